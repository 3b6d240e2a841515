"""Search for compilers, ninja and headers outside the project; a look-up needs none of it."""

from __future__ import annotations

import functools
import glob
import importlib.util
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .. import errors
from ..platform import is_cross_compiling, machine, output_of

_ONE_MACHINE = re.compile(r"-m(arch|cpu)=native")
_ONE_CPU = re.compile(
    r"-m(arch|cpu)=(?!x86-64$|armv8-a$|generic$).+"
    r"|-m(avx\w*|sse[34][\w.]*|ssse3|fma4?|f16c|bmi2?|lzcnt|popcnt|amx[\w-]*)"
)
_RELAXED_MATH = re.compile(
    r"-ffast-math|-Ofast|-funsafe-math-optimizations|-fassociative-math|-freciprocal-math"
    r"|-ffinite-math-only|-fno-signed-zeros|-ffp-contract=(?!off$).*|-ffp-model=(fast|aggressive)"
    r"|--?use_fast_math|--?ftz=true|--?prec-(div|sqrt)=false|--?fmad=true"
)
# programs that take a compiler's flags alone for a call of some compiler of their choice
_LAUNCHERS = frozenset(("ccache", "sccache", "distcc", "icecc", "buildcache"))


class Nvcc(NamedTuple):
    """nvcc or hipcc, and the folder of its toolkit, which holds ``bin`` and ``include``."""

    path: str
    home: str


_output = functools.cache(output_of)  # a command is run once


def _passed_on(flag: str) -> list[str]:
    # -Xcompiler=-march=native,-O2 hands on two
    return flag.replace("=-", ",-").split(",")


def is_for_this_machine(flag: str) -> bool:
    """Returns True if a flag is, or hands on, ``-march=native`` or ``-mcpu=native``."""
    return any(_ONE_MACHINE.fullmatch(part) for part in _passed_on(flag))


def unfit_flag(words: Sequence[str]) -> str:
    """Returns the first flag for one kind of CPU or relaxed arithmetic, with the reason, or ""."""
    # flags of the environment are not in the key: processes without them would load the library
    for flag in words:
        if is_for_this_machine(flag):
            return f"{flag} makes a library for this machine's CPU alone"
        for part in _passed_on(flag):
            if _ONE_CPU.fullmatch(part):
                return f"{flag} makes a library for one kind of CPU alone"
            if _RELAXED_MATH.fullmatch(part):
                return f"{flag} changes the results of floating-point arithmetic"
    return ""


def _words(variable: str) -> list[str]:
    text = os.environ.get(variable, "")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise errors.SettingError(
            f"{variable}={text!r} cannot be split into words: {error}"
        ) from None
    if reason := unfit_flag(words):
        raise errors.SettingError(
            f"{variable}={text!r}: {reason}; a library in the cache or a package serves others, too"
        )
    return words


def find_cxx() -> list[str]:
    """Returns the C++ compiler's command: the words of ``CXX``, else a usual compiler on PATH."""
    named = _words("CXX")
    whole = os.environ.get("CXX", "")
    if len(named) > 1 and os.path.isabs(whole.strip()) and shutil.which(whole.strip()):
        named = [whole.strip()]  # a path with blanks
    usual, package = ["g++", "c++", "clang++"], "g++"
    if is_cross_compiling():
        usual = [f"{machine()}-linux-gnu-g++"]
        package = f"g++-{machine().replace('_', '-')}-linux-gnu"
    for command in [named] if named else [[name] for name in usual]:
        if found := shutil.which(command[0]):
            return [found, *command[1:]]
    detail = f"CXX={whole!r} is not a program on PATH" if named else f"no {usual[0]} on PATH"
    raise errors.CompilerNotFoundError(
        f"no C++ compiler found: {detail}; install one (Debian and Ubuntu: apt install {package})"
    )


def _without_launcher(command: Sequence[str]) -> list[str]:
    """Returns a C++ compiler's command without the words of ccache or of another launcher."""
    for index, word in enumerate(command):
        found = None if word.startswith("-") else shutil.which(word)
        if found is None or os.path.basename(found) in _LAUNCHERS:
            continue
        question = (found, "-dM", "-E", "-x", "c++", "/dev/null")
        if len(command) == 1 or "__cplusplus" in _output(*question):
            return [found, *command[index + 1 :]]
    return list(command)


def nvcc_host_flags() -> list[str]:
    """Returns nvcc's flags for ``find_cxx``'s compiler, none if nvcc is told or chooses another."""
    own_choice = not os.environ.get("CXX", "").strip() and shutil.which("gcc")
    if own_choice or os.environ.get("NVCC_CCBIN"):
        return []
    given = [*_words("NVCC_PREPEND_FLAGS"), *_words("NVCC_APPEND_FLAGS")]
    if any(re.match("--?(ccbin|compiler-bindir)", flag) for flag in given):
        return []
    compiler, *flags = _without_launcher(find_cxx())
    # the suite's standard and level count, as they do for g++, which reads them last
    kept = [shlex.quote(flag) for flag in flags if not re.match(r"-std=|-O\w*$", flag)]
    # nvcc splits what it hands on at commas, for a shell
    escaped = [flag.replace("\\", "\\\\").replace(",", "\\,") for flag in kept]
    return [f"-ccbin={compiler}", *(f"-Xcompiler={flag}" for flag in escaped)]


def cxx_version() -> str:
    """Returns the first line that the C++ compiler prints for ``--version``, or "unknown"."""
    lines = _output(*find_cxx(), "--version").splitlines()
    return lines[0].strip() if lines else "unknown"


def _in_home(home: str, program: str) -> Nvcc | None:
    path = os.path.join(home, "bin", program)
    return Nvcc(path, home) if os.access(path, os.X_OK) and os.path.isfile(path) else None


def _find_toolkit(
    program: str,
    flags: Sequence[str],
    homes: Sequence[str],
    usual: Callable[[], Sequence[str]],
    missing: Callable[[str], errors.BuildError],
    advice: str,
) -> Nvcc:
    """Returns a GPU compiler; a folder that the first variable of ``homes`` names must have it."""
    for variable in flags:
        _words(variable)
    for variable in homes:
        if home := os.environ.get(variable, "").strip(": \t"):
            if found := _in_home(os.path.realpath(home), program):
                return found
            if variable == homes[0]:
                raise missing(f"{variable}={home} holds no bin/{program}")
    if on_path := shutil.which(program):
        return Nvcc(on_path, os.path.dirname(os.path.dirname(os.path.realpath(on_path))))
    for home in usual():
        if found := _in_home(home, program):
            return found
    raise missing(advice)


def _usual_cuda_homes() -> list[str]:
    """Returns the folders in which CUDA toolkits are usually installed, wheels first."""
    names = ("cu13", "cu12", "cuda_nvcc")
    wheels = [os.path.join(folder, "nvidia", name) for folder in sys.path for name in names]
    numbered = sorted(
        glob.glob("/usr/local/cuda-*"), key=lambda path: [*map(int, re.findall(r"\d+", path))]
    )
    return [*wheels, "/usr/local/cuda", *reversed(numbered)]


CUDA_HOMES = ("APEX_TE_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")
ROCM_HOMES = ("APEX_TE_ROCM_HOME", "ROCM_HOME", "ROCM_PATH")


def find_nvcc() -> Nvcc:
    """Returns nvcc: of ``CUDA_HOMES``, on PATH, of NVIDIA's wheels or in /usr/local/cuda*."""
    return _find_toolkit(
        "nvcc",
        ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"),
        CUDA_HOMES,
        _usual_cuda_homes,
        errors.NvccNotFoundError,
        "no nvcc found, which compiles for CUDA tensors (CPU tensors work without it): install the"
        " CUDA toolkit or `pip install nvidia-cuda-nvcc`, or name its folder in APEX_TE_CUDA_HOME",
    )


def find_hipcc() -> Nvcc:
    """Returns hipcc: of ``ROCM_HOMES``, on PATH or in /opt/rocm*."""
    return _find_toolkit(
        "hipcc",
        ("HIPCC_COMPILE_FLAGS_APPEND", "HIPCC_LINK_FLAGS_APPEND"),
        ROCM_HOMES,
        lambda: ["/opt/rocm", *sorted(glob.glob("/opt/rocm-*"), reverse=True)],
        errors.HipccNotFoundError,
        "no hipcc found, which compiles for AMD GPUs (CPU tensors work without it): install ROCm's"
        " hipcc (Debian and Ubuntu: apt install hipcc), or name its folder in APEX_TE_ROCM_HOME",
    )


def hipcc_version() -> str:
    """Returns the versions of hipcc and its clang, such as "hipcc 5.2.21153, clang 15.0.6"."""
    text = _output("env", "HIP_PLATFORM=amd", find_hipcc().path, "--version")
    release = re.search(r"HIP version: ([\d.]+)", text)
    clang = re.search(r"clang version ([\d.]+)", text)
    return f"hipcc {release[1] if release else 'unknown'}, clang {clang[1] if clang else 'unknown'}"


def nvcc_version(nvcc: Nvcc | None = None) -> str:
    """Returns the version of nvcc, such as "nvcc 13.0.88", "nvcc unknown" if it prints none."""
    text = _output((nvcc or find_nvcc()).path, "--version")
    release = re.search(r"release \d+\.\d+, V([\d.]+)", text)
    return f"nvcc {release[1] if release else 'unknown'}"


def nvcc_major() -> int:
    """Returns the major version of nvcc, 0 if nvcc does not print one."""
    return int((re.findall(r"(\d+)\.", nvcc_version()) or [0])[0])


def check_archs(nvcc: Nvcc, numbers: Sequence[str]) -> None:
    """Checks that nvcc knows GPU archs, written as ``Arch.number`` does: "90a"."""
    known = set(re.findall(r"sm_(\d+)", _output(nvcc.path, "--list-gpu-code")))
    for number in (number.rstrip("af") for number in numbers):
        if known and number not in known:
            names = ", ".join(f"{n[:-1]}.{n[-1]}" for n in sorted(known, key=int))
            raise errors.ArchError(
                f"unknown CUDA arch {number[:-1]}.{number[-1]}"
                f" for {nvcc.path} ({nvcc_version(nvcc)}), which knows {names}"
            )


def find_ninja() -> str:
    """Returns the path of ninja: of the Python package ``ninja``, else on PATH."""
    import sysconfig  # here, because it is slow to import and a look-up does not need it

    spec = importlib.util.find_spec("ninja")
    if spec is not None and spec.origin is not None:
        inside = os.path.join(os.path.dirname(spec.origin), "data", "bin")
        scripts = os.path.dirname(sys.executable or ""), sysconfig.get_path("scripts")
        if found := shutil.which("ninja", path=os.pathsep.join((inside, *scripts))):
            return found
    if found := shutil.which("ninja"):
        return found
    raise errors.NinjaNotFoundError("no ninja found, which drives the compilers: pip install ninja")


def python_include() -> str:
    """Returns the folder of the running Python's ``Python.h``."""
    import sysconfig

    folder = sysconfig.get_paths()["include"]
    if not os.path.isfile(os.path.join(folder, "Python.h")):
        raise errors.HeaderNotFoundError(
            f"Python.h is not in {folder}: install Python's headers"
            f" (Debian and Ubuntu: apt install python3-dev; or python{sys.version_info[0]}."
            f"{sys.version_info[1]}-dev for another Python than the system's)"
        )
    return folder


def pybind11_include() -> str:
    """Returns the folder of pybind11's headers, found without importing pybind11."""
    spec = importlib.util.find_spec("pybind11")
    for package in (spec.submodule_search_locations or ()) if spec is not None else ():
        folder = os.path.join(package, "include")
        if os.path.isfile(os.path.join(folder, "pybind11", "pybind11.h")):
            return folder
    raise errors.HeaderNotFoundError("pybind11's headers are missing: pip install pybind11")


def pybind11_version() -> str:
    """Returns the version in pybind11's own header, "none" without pybind11."""
    try:
        path = os.path.join(pybind11_include(), "pybind11", "detail", "common.h")
    except errors.HeaderNotFoundError:
        return "none"
    with open(path, encoding="utf-8", errors="replace") as file:
        head = file.read(8192)
    parts = re.findall(r"#\s*define PYBIND11_VERSION_(?:MAJOR|MINOR|MICRO|PATCH)\s+(\w+)", head)
    return ".".join(parts) or "unknown"


def find_header(header: str, package: str, nvcc: Nvcc) -> list[str]:
    """Returns the folder of a CUDA wheel that has a header, none if a toolkit has the header."""
    toolkits = [nvcc.home, *glob.glob(os.path.join(nvcc.home, "targets", "*")), "/usr/local/cuda"]
    if any(os.path.isfile(os.path.join(home, "include", header)) for home in toolkits):
        return []
    major = nvcc_major()
    for folder in sys.path:
        for name in (f"cu{major}", package):
            include = os.path.join(folder, "nvidia", name, "include")
            if os.path.isfile(os.path.join(include, header)):
                return [include]
    raise errors.HeaderNotFoundError(
        f"{header} is neither in the CUDA toolkit {nvcc.home} nor in a wheel:"
        f" pip install nvidia-{package}"
    )
