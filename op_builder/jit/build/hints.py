"""Advice on a failed build or load, chosen by patterns in the messages of compilers and ld.so."""

# of g++ and ld 12, clang 15 to 20, nvcc 11 to 13, hipcc 5, ninja, ld.so

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from . import resources

_FLAGS = re.IGNORECASE | re.MULTILINE
# what a compiler says about the sources may quote any word of them
_ABOUT_SOURCES = r"\s|\S+?(?::\d+:\d+|\(\d+\)): (?:error|warning|note)\b"


def _line(pattern: str) -> re.Pattern[str]:
    """Returns a pattern that finds ``pattern`` in lines that are not about the sources."""
    return re.compile(rf"^(?!{_ABOUT_SOURCES}).*?(?:{pattern})", _FLAGS)


NO_SPACE = _line(
    r"No space left on device|Disk quota exceeded|File too large|file size limit exceeded"
)
NO_PERMISSION = _line(
    r"Permission denied|Read-only file system|Operation not permitted"
    r"|could not open output file|output file '.*' could not be opened"
)
KILLED = _line(
    r"\bKilled\b|died due to signal 9|\[code=137\]"
    r"|out of memory|cannot allocate memory|virtual memory exhausted|bad_alloc"
)
# not every fatal error's "compilation terminated."
STOPPED = _line(
    r"(?-i:\bTerminated\b)|died due to signal|subcommand interrupted|interrupted by user"
    r"|Segmentation fault|internal compiler error|\bAborted\b"
)
_CRASHED = _line(r"Segmentation fault|internal compiler error|died due to signal (?:6|11)\b")
_HEADER = re.compile(
    r"^\S+:\d+:\d+: fatal error: '?(?P<host>[^\s':]+)'?(?:: No such file| file not found)"
    r"|^\S+\(\d+\): catastrophic error: cannot open source file \"(?P<device>[^\"]+)\"",
    _FLAGS,
)
_HOST_GCC = re.compile(r"unsupported GNU version! gcc versions later than (?P<limit>\d+)")
_HOST_CLANG = re.compile(
    r"unsupported clang version! clang version must be less than (?P<limit>\d+)"
)
_NO_HOST = _line(r"Failed to preprocess host compiler properties")
_ARCH = _line(
    r"Unsupported gpu architecture '(?:compute|sm|lto)_(?P<cuda>\d+[af]?)'"
    r"|(?:invalid target ID|unsupported HIP gpu architecture:?) '?(?P<hip>gfx\w+)"
)
NOT_EXECUTABLE = re.compile(r"failed to map segment from shared object", _FLAGS)
_DAMAGED = (
    r"file too short|invalid ELF header|cannot read file data|ELF load command|wrong ELF class"
)
_BROKEN = re.compile(rf"{_DAMAGED}|undefined symbol", _FLAGS)
_OLD_SYSTEM = r"version [`'](?:GLIBC|GLIBCXX|CXXABI)_[\w.]+' not found"
REBUILT = re.compile(f"{_DAMAGED}|{_OLD_SYSTEM}", _FLAGS)  # what a library built here would not get

_TOOLKIT = "the CUDA toolkit (install it, name its folder in APEX_TE_CUDA_HOME, or pip install {})"
# the first pattern that matches a missing header's name says who has it
_HEADERS: tuple[tuple[str, str], ...] = (
    (r"(.*/)?Python\.h", "Python's headers (Debian and Ubuntu: apt install python3-dev)"),
    (r"pybind11/.*", "pybind11 (pip install pybind11)"),
    (r"(torch|ATen|c10|caffe2)/.*", "torch; this one was installed without its headers"),
    (r"cublas\w*\.h", _TOOLKIT.format("nvidia-cublas")),
    (r"crt/.*", _TOOLKIT.format("nvidia-cuda-crt")),
    (r"(nv|cuda|cub|thrust)/.*", _TOOLKIT.format("nvidia-cuda-cccl")),
    (r"(cuda|driver_types|vector_types|device_).*\.h(pp)?", _TOOLKIT.format("nvidia-cuda-runtime")),
    (r"(hip|hipblas\w*|rocm\w*)/.*", "ROCm's HIP development packages"),
    (r"common/.*", "apex_te itself: its installation, or the path in the #include, is not right"),
    (
        r"(?!.*\.).*|(std\w+|math|string|errno|limits|features|assert|bits/.*|sys/.*|gnu/.*)\.h",
        "the C and C++ development files (Debian and Ubuntu: apt install g++ libc6-dev)",
    ),
)


def _memory(_: re.Match[str]) -> str:
    free = resources.free_memory()
    known = f"; {free >> 20} MiB are free now" if free is not None else ""
    return (
        "the compiler was killed, as the kernel does when memory runs out: set MAX_JOBS=1, or give"
        f" the process or container more (one compiler may need {resources.BYTES_PER_JOB >> 20}"
        f" MiB{known})"
    )


def _header(match: re.Match[str]) -> str:
    name = match["host"] or match["device"]
    for pattern, owner in _HEADERS:
        if re.fullmatch(pattern, name):
            return f"{name} is missing, which belongs to {owner}"
    return (
        f"{name} is missing: install the package it belongs to, or name its folder in CPATH"
        " (a header of an op lies in csrc)"
    )


def _arch(match: re.Match[str]) -> str:
    if match["hip"]:
        return f"this hipcc does not know {match['hip']}: name another arch, or use a newer ROCm"
    digits = re.sub(r"\D", "", match["cuda"])
    return (
        f"this nvcc does not know arch {digits[:-1]}.{digits[-1]}: name others, such as"
        ' APEX_TE_CUDA_ARCH_LIST="9.0", or use another CUDA toolkit (APEX_TE_CUDA_HOME)'
    )


# pattern -> advice, as text with the names of the pattern's groups in braces, or made of the match
_Rules = dict[re.Pattern[str], str | Callable[[re.Match[str]], str]]
_BUILD_RULES: _Rules = {
    KILLED: _memory,
    _CRASHED: "the compiler crashed: try once more, or another one (CXX)",
    _HOST_GCC: (
        "nvcc takes g++ up to {limit}: install g++-{limit} and set CXX=g++-{limit}, or use a newer"
        " CUDA toolkit (APEX_TE_CUDA_HOME)"
    ),
    _HOST_CLANG: (
        "nvcc takes clang below {limit}: name another host compiler in CXX, such as g++, or use a"
        " newer CUDA toolkit (APEX_TE_CUDA_HOME)"
    ),
    _NO_HOST: "nvcc cannot run its host compiler: CXX must name a g++ or clang++ that works",
    _ARCH: _arch,
    _HEADER: _header,
    NO_PERMISSION: (
        "look at owner and mode of the file named: sources must be readable, the cache writable"
        " (another one: APEX_TE_CACHE_DIR)"
    ),
}
_LOAD_RULES: _Rules = {
    NOT_EXECUTABLE: (
        "the library lies on a file system mounted noexec: set APEX_TE_CACHE_DIR to a folder on"
        " another one"
    ),
    _BROKEN: (
        "the compiler left a broken library: remove it and build it again"
        " (python -m apex_te clean <op>, then build <op>)"
    ),
    re.compile(_OLD_SYSTEM, _FLAGS): (
        "the library was built on a newer system than this one: build it here"
        " (python -m apex_te clean <op>, then build <op>), or prebuild on the older system"
    ),
}


def _first(rules: _Rules, text: str) -> str:
    """Returns the advice of the first rule that fits a text, "" if none does."""
    for pattern, advice in rules.items():
        if match := pattern.search(text):
            return advice.format(**match.groupdict()) if isinstance(advice, str) else advice(match)
    return ""


building = functools.partial(_first, _BUILD_RULES)  # the output of a failed compiler or linker
loading = functools.partial(_first, _LOAD_RULES)  # the message of a failed dlopen


def load_error(
    what: str, path: str, problem: ImportError, is_extension: bool = False
) -> ImportError:
    """Returns the error, with advice, to raise for a library that dlopen refuses."""
    # an extension may rightly need symbols of libraries that its owner must name
    own = is_extension and "undefined symbol" in str(problem)
    advice = "" if own else loading(str(problem))
    hint = f"\n  hint: {advice}" if advice else ""
    return ImportError(f"{what}: {path} cannot be loaded: {problem}{hint}", path=path)
