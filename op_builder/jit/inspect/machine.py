"""What a report says about the machine, the compilers, torch, the GPUs and the settings.

Nothing here imports torch, initialises CUDA in this process, or writes anything.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .. import env
from ..backends import archs, toolchain
from ..build import resources
from ..errors import BuildError, SettingError
from ..platform import installed_torch, is_hip

Facts = dict[str, Any]
UNREAD = "nothing reads it"


def gpus(known: Sequence[str]) -> Facts:
    """Returns the driver and the visible GPUs; "problem" says why there are none.

    Args:
        known: archs of the GPUs as the builders see them, which is all that is told of AMD's.
    """
    answer = archs.ask_driver()
    if not answer["devices"] and known:
        answer["devices"] = [{"name": "GPU", "arch": arch, "memory": None} for arch in known]
    return answer


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            found = re.search(r"^model name\s*:\s*(.*)$", file.read(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor()


def machine() -> Facts:
    """The computer, as far as builds depend on it."""
    libc = "-".join(part for part in platform.libc_ver() if part)
    facts = {
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu_name(),
        "architecture": platform.machine(),
        "libc": libc or "unknown",
        "cpus": resources.cpus(),
        "memory_free": resources.free_memory(),
    }
    try:
        facts["jobs"] = resources.jobs()
    except SettingError:
        facts["jobs"] = None  # the settings say why
    return facts


def python() -> Facts:
    """The running interpreter."""
    return {
        "version": platform.python_version(),
        "implementation": platform.python_implementation(),
        "executable": sys.executable,
    }


def torch() -> Facts:
    """Returns the versions of the installed torch and its place, read off its files."""
    return installed_torch()._asdict()


def _cxx_origin(path: str) -> str:
    return "CXX" if os.environ.get("CXX", "").strip() else "PATH"


def _home_origin(path: str, program: str, variables: Sequence[str]) -> str:
    for variable in variables:
        home = os.environ.get(variable, "").strip(": \t")
        if home and path.startswith(os.path.realpath(home) + os.sep):
            return variable
    return "PATH" if shutil.which(program) == path else "the usual places"


def _nvcc_origin(path: str) -> str:
    return _home_origin(path, "nvcc", ("APEX_TE_CUDA_HOME", "CUDA_HOME", "CUDA_PATH"))


def _hipcc_origin(path: str) -> str:
    return _home_origin(path, "hipcc", ("APEX_TE_ROCM_HOME", "ROCM_HOME", "ROCM_PATH"))


def _tool(name: str, find: Callable[[], tuple[str, str]], origin: Callable[[str], str]) -> Facts:
    """Where a program or header is and which version, or the error that a build would raise."""
    try:
        path, version = find()
    except BuildError as error:
        return {"name": name, "path": None, "version": None, "origin": None, "missing": str(error)}
    return {
        "name": name,
        "path": path,
        "version": version,
        "origin": origin(path),
        "missing": None,
    }


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (done.stdout.splitlines() or ["unknown"])[0].strip()


def _cxx() -> tuple[str, str]:
    return " ".join(toolchain.find_cxx()), toolchain.cxx_version()


def _nvcc() -> tuple[str, str]:
    return toolchain.find_nvcc().path, toolchain.nvcc_version().removeprefix("nvcc ")


def _hipcc() -> tuple[str, str]:
    return toolchain.find_hipcc().path, toolchain.hipcc_version().removeprefix("hipcc ")


def _ninja() -> tuple[str, str]:
    path = toolchain.find_ninja()
    return path, _first_line([path, "--version"])


def _pybind11() -> tuple[str, str]:
    return toolchain.pybind11_include(), toolchain.pybind11_version()


def _python_h() -> tuple[str, str]:
    return toolchain.python_include(), platform.python_version()


def _cublaslt() -> tuple[str, str]:
    nvcc = toolchain.find_nvcc()
    folders = toolchain.find_header("cublasLt.h", "cublas", nvcc)
    return (folders[0] if folders else nvcc.home), ""


def tools() -> list[Facts]:
    """What builds need, in the order in which they need it."""
    usual = lambda path: ""  # noqa: E731
    found = [
        _tool("C++", _cxx, _cxx_origin),
        _tool("nvcc", _nvcc, _nvcc_origin),
        _tool("ninja", _ninja, usual),
        _tool("Python.h", _python_h, usual),
        _tool("pybind11", _pybind11, usual),
        _tool("cublasLt.h", _cublaslt, usual),
    ]
    hipcc = _tool("hipcc", _hipcc, _hipcc_origin)
    with contextlib.suppress(SettingError):  # the settings say what is wrong
        if not hipcc["missing"] or is_hip():
            found.insert(2, hipcc)
    return found


def _boolean(name: str) -> Callable[[], object]:
    return lambda: env.boolean(name, None)


def _archs() -> object:
    named = archs.named_arch_list()
    return archs.parse_arch_list(named[1], lambda: [(9, 0)]) if named else None


# every variable that the suite and its benchmarks read at run time -> what reading it does, which
# raises BuildError for a bad value
_READ: dict[str, Callable[[], object] | None] = {
    "APEX_TE_CACHE_DIR": None,
    "APEX_TE_CACHE_PATH": None,
    "APEX_TE_COMMIT": None,
    "APEX_TE_CPU_ISA": None,
    "APEX_TE_CUDA_ARCH_LIST": _archs,
    "APEX_TE_CUDA_HOME": None,
    "APEX_TE_DISABLE_JIT": env.jit_disabled,
    "APEX_TE_GEMM_TUNE": _boolean("APEX_TE_GEMM_TUNE"),
    "APEX_TE_GPU_PLATFORM": is_hip,
    "APEX_TE_JIT_RETRY": env.jit_retry,
    "APEX_TE_JIT_VERBOSE": env.jit_verbose,
    "APEX_TE_LOCK_TIMEOUT": env.lock_timeout,
    "APEX_TE_NVTX": None,
    "APEX_TE_PEER_MEMORY": _boolean("APEX_TE_PEER_MEMORY"),
    "APEX_TE_ROCM_ARCH": _archs,
    "APEX_TE_ROCM_HOME": None,
    "APEX_TE_SANITIZE": env.sanitizers,
    "APEX_TE_TOPLEVEL_COMPAT": _boolean("APEX_TE_TOPLEVEL_COMPAT"),
    "CUDA_HOME": None,
    "CUDA_PATH": None,
    "CUDA_VISIBLE_DEVICES": None,
    "CXX": None,
    "MAX_JOBS": resources.jobs,
    "PYTORCH_ROCM_ARCH": _archs,
    "ROCM_HOME": None,
    "ROCM_PATH": None,
    "TORCH_CUDA_ARCH_LIST": _archs,
    "XDG_CACHE_HOME": None,
    "XDG_RUNTIME_DIR": None,
}


def settings() -> list[Facts]:
    """The variables that are set and that builds or look-ups read; "problem" says what is wrong.

    A variable of the suite's own prefix that nothing reads is probably misspelt, and is named.
    """
    found = []
    for name in sorted(os.environ):
        ours = name.startswith("APEX_TE_")
        if not os.environ[name] or not (ours or name in _READ):
            continue
        problem = ""
        read = _READ.get(name)
        if ours and name not in _READ:
            problem = UNREAD
        elif read is not None:
            try:
                read()
            except BuildError as error:
                problem = str(error)
        found.append({"name": name, "value": os.environ[name], "problem": problem})
    return found
