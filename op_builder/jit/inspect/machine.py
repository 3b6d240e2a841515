"""Facts about machine, compilers, torch, GPUs and variables, without importing torch or writing."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ...spec import SUITE
from .. import env
from ..backends import archs, toolchain
from ..build import resources
from ..errors import BuildError, SettingError
from ..platform import CUDA, ROCM, is_hip, output_of, text_of

Facts = dict[str, Any]
UNREAD = "nothing reads it"


def suite_version() -> str:
    """Returns the version of apex_te, "unknown" without a ``_version.py``."""
    texts = "\n".join(text_of(str(SUITE / name)) for name in ("_version.py", "apex_te/_version.py"))
    found = re.search(r'^__version__\s*=\s*"([^"]+)"', texts, re.MULTILINE)
    return found[1] if found else "unknown"


def gpus(known: Sequence[str]) -> Facts:
    """Returns the facts of ``archs.ask_driver``; ``known`` archs stand in for AMD's GPUs."""
    answer = archs.ask_driver()
    if not answer["devices"] and known:
        answer["devices"] = [{"name": "GPU", "arch": arch, "memory": None} for arch in known]
    return answer


def machine() -> Facts:
    """Returns facts of the computer; "memory_free" in bytes, "jobs" None for a bad ``MAX_JOBS``."""
    libc = "-".join(part for part in platform.libc_ver() if part)
    model = re.search(r"^model name\s*:\s*(.*)$", text_of("/proc/cpuinfo"), re.MULTILINE)
    facts = {
        "system": f"{platform.system()} {platform.release()}",
        "cpu": model[1].strip() if model else platform.processor(),
        "architecture": platform.machine(),
        "libc": libc or "unknown",
        "cpus": resources.cpus(),
        "memory_free": resources.free_memory(),
        "jobs": None,
    }
    with contextlib.suppress(SettingError):  # the settings say why
        facts["jobs"] = resources.jobs()
    return facts


def python() -> Facts:
    """Returns version, implementation and path of the running Python, as a dict for JSON."""
    return {
        "version": platform.python_version(),
        "implementation": platform.python_implementation(),
        "executable": sys.executable,
    }


def _gpu_compiler(
    name: str, found: toolchain.Nvcc, version: str, homes: Sequence[str]
) -> tuple[str, str, str]:
    origin = "PATH" if shutil.which(name) == found.path else "the usual places"
    for variable in reversed(homes):
        home = os.environ.get(variable, "").strip(": \t")
        if home and found.path.startswith(os.path.realpath(home) + os.sep):
            origin = variable
    return found.path, version.removeprefix(f"{name} "), origin


def _ninja() -> tuple[str, str, str]:
    path = toolchain.find_ninja()
    said = output_of(path, "--version").splitlines()
    return path, said[0].strip() if said else "unknown", ""


def _cublaslt() -> tuple[str, str, str]:
    nvcc = toolchain.find_nvcc()
    folders = toolchain.find_header("cublasLt.h", "cublas", nvcc)
    return (folders[0] if folders else nvcc.home), "", ""


def _cxx_origin() -> str:
    return "CXX" if os.environ.get("CXX", "").strip() else "PATH"


# name -> a function that returns the texts (path, version, origin), of which the origin is the
# variable or place that led to the tool, or "". It raises the BuildError that a build would raise.
_TOOLS: dict[str, Callable[[], tuple[str, str, str]]] = {
    "C++": lambda: (" ".join(toolchain.find_cxx()), toolchain.cxx_version(), _cxx_origin()),
    "nvcc": lambda: _gpu_compiler(
        "nvcc", toolchain.find_nvcc(), toolchain.nvcc_version(), toolchain.CUDA_HOMES
    ),
    "hipcc": lambda: _gpu_compiler(
        "hipcc", toolchain.find_hipcc(), toolchain.hipcc_version(), toolchain.ROCM_HOMES
    ),
    "ninja": _ninja,
    "Python.h": lambda: (toolchain.python_include(), platform.python_version(), ""),
    "pybind11": lambda: (toolchain.pybind11_include(), toolchain.pybind11_version(), ""),
    "cublasLt.h": _cublaslt,
}


def tools() -> list[Facts]:
    """Returns compilers, programs and headers that builds need, or why they are missing."""
    found = []
    for_amd = False
    with contextlib.suppress(SettingError):  # the settings say so
        for_amd = is_hip()
    for name, find in _TOOLS.items():
        path = version = origin = missing = None
        try:
            path, version, origin = find()
        except BuildError as error:
            missing = str(error)
        if name != "hipcc" or not missing or for_amd:
            facts = {"name": name, "path": path, "version": version, "origin": origin}
            found.append({**facts, "missing": missing})
    return found


def _archs() -> object:
    named = archs.named_arch_list()
    # arch 9.0 stands in for the word "native"
    return archs.parse_arch_list(named[1], lambda: [(9, 0)]) if named else None


# Every variable that the suite and its benchmarks read at run time: booleans, those that nobody
# checks before use, and those with a function whose reading raises BuildError for a bad value.
_BOOLEANS = (
    "APEX_TE_APEX", "APEX_TE_BATCH_INVARIANT", "APEX_TE_FUSED_SWIGLU", "APEX_TE_GEMM_TUNE",
    "APEX_TE_PEER_MEMORY", "APEX_TE_TOPLEVEL_COMPAT", "APEX_TE_TRANSFORMER_ENGINE",
)  # fmt: skip
_UNCHECKED = (
    "APEX_TE_CACHE_DIR", "APEX_TE_CACHE_PATH", "APEX_TE_COMMIT", "APEX_TE_CPU_ISA",
    "APEX_TE_CUDA_HOME", "APEX_TE_NVTX", "APEX_TE_ROCM_HOME", "APEX_TE_TE_VERSION", "CUDA_HOME",
    "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CXX", "ROCM_HOME", "ROCM_PATH", "XDG_CACHE_HOME",
    "XDG_RUNTIME_DIR",
)  # fmt: skip
_READ: dict[str, Callable[[], object] | None] = {
    **dict.fromkeys(_UNCHECKED),
    **{name: functools.partial(env.boolean, name, None) for name in _BOOLEANS},
    **{name: _archs for each in (CUDA, ROCM) for name in each.arch_variables},
    "APEX_TE_DISABLE_JIT": env.jit_disabled,
    "APEX_TE_GPU_PLATFORM": is_hip,
    "APEX_TE_JIT_RETRY": env.jit_retry,
    "APEX_TE_JIT_VERBOSE": env.jit_verbose,
    "APEX_TE_LOCK_TIMEOUT": env.lock_timeout,
    "APEX_TE_SANITIZE": env.sanitizers,
    "MAX_JOBS": resources.jobs,
}


def settings() -> list[Facts]:
    """Returns the variables that are set and that look-ups or builds read, with their problems."""
    found = []
    for name, value in sorted(os.environ.items()):
        if value and (name.startswith("APEX_TE_") or name in _READ):
            problem = "" if name in _READ else UNREAD
            try:
                if read := _READ.get(name):
                    read()
            except BuildError as error:
                problem = str(error)
            found.append({"name": name, "value": value, "problem": problem})
    return found
