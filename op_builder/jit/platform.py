"""Platform of keys, archs and flags: GPUs, torch, Python, and the CPU with its features."""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .errors import SettingError


class Torch(NamedTuple):
    """Facts of the installed torch, read from its files; each field is None if it is not known."""

    path: str | None = None
    version: str | None = None
    cuda: str | None = None
    hip: str | None = None


class GpuPlatform(NamedTuple):
    """CUDA or ROCm; the first of ``arch_variables`` that is set lists archs."""

    name: str
    arch_variables: tuple[str, ...]
    example: str


CUDA = GpuPlatform(
    "CUDA",
    ("APEX_TE_CUDA_ARCH_LIST", "TORCH_CUDA_ARCH_LIST"),
    'APEX_TE_CUDA_ARCH_LIST="9.0" (several: "8.0;9.0+PTX")',
)
ROCM = GpuPlatform(
    "ROCm",
    ("APEX_TE_ROCM_ARCH", "PYTORCH_ROCM_ARCH"),
    'APEX_TE_ROCM_ARCH="gfx90a" (several: "gfx90a;gfx942")',
)


def text_of(path: str) -> str:
    """Returns the text of a file, "" if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


@functools.cache
def installed_torch() -> Torch:
    """Returns folder and versions of the torch that an import would find; does not import it."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        return Torch()
    folder = os.path.dirname(spec.origin)
    text = text_of(os.path.join(folder, "version.py"))

    def value(name: str) -> str | None:
        found = re.search(rf"""^{name}\b[^=\n]*=\s*['"]([^'"]+)['"]""", text, re.MULTILINE)
        return found[1] if found else None

    return Torch(folder, value("__version__"), value("cuda"), value("hip"))


def torch_hip_version() -> str | None:
    """Returns the HIP version that torch was built for, None for another torch or none."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "version"):
        return getattr(torch.version, "hip", None)
    return installed_torch().hip


def is_hip() -> bool:
    """Returns True if GPU code is for AMD: by ``APEX_TE_GPU_PLATFORM``, else by torch's build."""
    named = os.environ.get("APEX_TE_GPU_PLATFORM", "").strip().lower()
    if not named:
        return torch_hip_version() is not None
    if named not in ("cuda", "hip"):
        raise SettingError(f'APEX_TE_GPU_PLATFORM must be "cuda" or "hip", got {named!r}')
    return named == "hip"


def gpu_platform() -> GpuPlatform:
    """Returns the platform to compile GPU code for, ``ROCM`` or ``CUDA``."""
    return ROCM if is_hip() else CUDA


_other_machine: str | None = None


def machine() -> str:
    """Returns the CPU architecture that libraries are for, which ``compile_for`` may set."""
    return _other_machine or os.uname().machine


def is_cross_compiling() -> bool:
    """Returns True if libraries are compiled for another CPU architecture than this machine's."""
    return machine() != os.uname().machine


@contextlib.contextmanager
def compile_for(name: str) -> Iterator[None]:
    """Compiles the libraries of a ``with`` block for another CPU architecture, in all threads."""
    global _other_machine
    previous, _other_machine = _other_machine, name
    try:
        yield
    finally:
        _other_machine = previous


def suffix_on(suffix: str) -> str:
    """Returns a suffix of extension modules with the architecture that libraries are for."""
    return suffix.replace(os.uname().machine, machine())


@functools.cache
def glibc() -> tuple[int, ...]:
    """Returns the version of this system's glibc, such as (2, 36); () for another C library."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (OSError, ValueError):
        return ()
    return tuple(map(int, re.findall(r"\d+", version))) if name == "glibc" else ()


def output_of(*command: str) -> str:
    """Runs a command and returns its standard output, "" if it fails."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=60,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


# ``sys.executable`` of a program that embeds Python, or is frozen, is that program
_INTERPRETER = re.compile(r"(python|pypy)[\d.]*(d|t|td|-dbg)?")
_VERSION = "import sys; print(sys.implementation.name, *sys.version_info[:2], sys.maxsize)"


def _is_same_file(path: str, other: str) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samefile(path, other)
    return False


@functools.cache
def _find_python(executable: str, frozen: bool) -> str | None:
    named = _INTERPRETER.fullmatch(os.path.basename(executable)) is not None
    if named and not frozen and _is_same_file(executable, "/proc/self/exe"):
        return executable
    import sysconfig

    mine = (sys.implementation.name, *sys.version_info[:2], sys.maxsize)
    number = f"{sys.version_info[0]}.{sys.version_info[1]}"
    base = getattr(sys, "_base_executable", None) or ""
    prefixes = (sys.base_exec_prefix, sys.base_prefix, sys.exec_prefix)
    folders = [sysconfig.get_config_var("BINDIR"), *(os.path.join(p, "bin") for p in prefixes)]
    names = [f"python{number}{getattr(sys, 'abiflags', '')}", f"python{number}", "python3"]
    found = [base] if _INTERPRETER.fullmatch(os.path.basename(base)) else []
    found += [os.path.join(folder, name) for folder in folders if folder for name in names]
    for path in dict.fromkeys(found):
        if not os.access(path, os.X_OK) or _is_same_file(path, executable):
            continue
        if output_of(path, "-I", "-S", "-c", _VERSION).split() == [str(part) for part in mine]:
            return path
    return None


def python_program() -> str | None:
    """Returns an interpreter of the running version, not a program that embeds Python, or None."""
    return _find_python(sys.executable or "", bool(getattr(sys, "frozen", False)))


def soabi() -> str:
    """Returns this Python's extension suffix, such as ".cpython-312-x86_64-linux-gnu.so"."""
    return suffix_on(importlib.machinery.EXTENSION_SUFFIXES[0])


# Macros that GCC and Clang predefine, with the names that /proc/cpuinfo has for the features. The
# baselines, x86-64 with SSE2 and armv8-a with Advanced SIMD, have none of them.
_SAME = [
    "ssse3", "sse4_1", "sse4_2", "popcnt", "movbe", "bmi2", "avx", "avx2", "f16c", "fma",
    "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl",
]  # fmt: skip
_ARM = ("atomics", "crc32", "bf16", "sve", "sve2")
_MACROS = {f"__{name.upper()}__": name for name in _SAME} | {
    **{f"__ARM_FEATURE_{name.upper()}": name for name in _ARM},
    **{f"__AVX512{name.upper()}__": f"avx512_{name}" for name in ("bf16", "fp16", "vnni")},
    "__SSE3__": "pni",
    "__LZCNT__": "abm",
    "__BMI__": "bmi1",
    "__ARM_FEATURE_DOTPROD": "asimddp",
    "__ARM_FEATURE_FP16_VECTOR_ARITHMETIC": "asimdhp",
}


@functools.cache
def _predefined(command: tuple[str, ...]) -> frozenset[str]:
    lines = output_of(*command, "-dM", "-E", "-x", "c++", "/dev/null").splitlines()
    return frozenset(line.split()[1] for line in lines if line.startswith("#define "))


def compiled_for(command: Sequence[str]) -> list[str]:
    """Returns features beyond the baseline that a compiler uses wherever it likes, sorted."""
    return sorted(_MACROS[name] for name in _predefined(tuple(command)) & _MACROS.keys())


@functools.cache
def own_cpu_features() -> frozenset[str] | None:
    """Returns the features of this machine's CPU, None if the kernel does not list them."""
    for line in text_of("/proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return None


def missing_features(features: Iterable[str]) -> list[str]:
    """Returns those of ``features`` that this machine's CPU lacks, sorted."""
    wanted = set(features)
    here = own_cpu_features() if wanted else None
    return sorted(wanted - here) if here is not None else []
