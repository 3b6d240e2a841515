"""Extensions with a ``PYBIND11_MODULE`` that include torch: flags, cache-key texts, exports."""

# not by torch.utils.cpp_extension: importing it takes long, needs setuptools and prints

from __future__ import annotations

import contextlib
import glob
import os
import re
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from ...spec import OpSpec, without_comments
from ..errors import HeaderNotFoundError, NvccNotFoundError
from ..platform import soabi
from . import toolchain

# An extension's numbers are its author's: contraction stays as the compilers have it.
CXX_ARGS = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden"]
NVCC_ARGS = [
    "-std=c++20", "-O3", "-Xfatbin=-compress-all", "-Xcompiler=-fPIC,-fvisibility=hidden",
    # what torch.utils.cpp_extension gives every .cu: torch's headers define these themselves
    "-D__CUDA_NO_HALF_OPERATORS__", "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__", "-D__CUDA_NO_HALF2_OPERATORS__",
    "--expt-relaxed-constexpr",
]  # fmt: skip

_MODULE = re.compile(r"\bPYBIND11_MODULE\s*\(\s*(\w+)\s*,\s*(\w+)")


class Exports(NamedTuple):
    """Names that sources define; ``module`` is "" without ``PYBIND11_MODULE``."""

    module: str
    functions: tuple[str, ...]
    values: tuple[str, ...]


def installed_torch(op: str) -> Any:
    """Returns the module torch, imported, which an extension is compiled against."""
    try:
        import torch

        return torch
    except ImportError as error:
        raise HeaderNotFoundError(
            f'{op}: an op with BINDING = "pybind11" is built against torch, which cannot be'
            f" imported here ({error}); install torch, and pip install with --no-build-isolation"
        ) from error


def uses_cuda(spec: OpSpec) -> bool:
    """Returns True for an op of the CUDA group (``INCLUDE_FLAG``) or with a ``.cu`` source."""
    return spec.INCLUDE_FLAG == "APEX_BUILD_CUDA_OPS" or spec.needs_archs("cpu")


def key_extras(spec: OpSpec) -> list[str]:
    """Returns cache-key texts: Python's suffix, torch's version, C++ ABI, CUDA and HIP versions."""
    torch = installed_torch(spec.NAME)
    return [
        soabi(),
        f"torch {torch.__version__}",
        f"C++ ABI {int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"CUDA {torch.version.cuda}",
        f"HIP {torch.version.hip}",
    ]


def compile_flags(spec: OpSpec, kind: str) -> list[str]:
    """Returns the base flags for compiling one kind of source, without the op's own."""
    abi = int(installed_torch(spec.NAME)._C._GLIBCXX_USE_CXX11_ABI)
    return [
        *(NVCC_ARGS if kind == "cuda" else CXX_ARGS),
        f"-DTORCH_EXTENSION_NAME={spec.NAME}",
        "-DTORCH_API_INCLUDE_EXTENSION_H",
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
    ]


def accepted(flags: Iterable[str]) -> list[str]:
    """Returns an op's own flags without those for a C++ standard older than torch's headers'."""
    return [flag for flag in flags if not re.fullmatch(r"--?std=(c|gnu)\+\+(11|14|17)", flag)]


def link_flags(spec: OpSpec) -> list[str]:
    """Returns the op's own flags, and those that link torch's libraries for what the op uses."""
    extra: Iterable[str] = getattr(spec, "extra_ldflags", list)()
    own = [*spec.libraries_args(), *extra]  # apex's builders name libraries without -l
    own = [name if name.startswith("-") or "/" in name else f"-l{name}" for name in own]
    torch = installed_torch(spec.NAME)
    names = ["c10", "torch", "torch_cpu", "torch_python"]
    if uses_cuda(spec):
        for version, suffix in ((torch.version.cuda, "cuda"), (torch.version.hip, "hip")):
            if version is not None:
                names.extend([f"c10_{suffix}", f"torch_{suffix}"])
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    return [*own, f"-L{folder}", *(f"-l{name}" for name in names)]


def include_paths(spec: OpSpec) -> list[str]:
    """Returns the include folders of torch, of Python and, for a CUDA extension, of CUDA."""
    base = os.path.join(os.path.dirname(installed_torch(spec.NAME).__file__), "include")
    own = os.path.join(base, "torch", "csrc", "api", "include")
    cuda = _cuda_include_paths() if uses_cuda(spec) else []
    return [base, own, toolchain.python_include(), *cuda]


def _cuda_include_paths() -> list[str]:
    """Returns the existing include folders of the CUDA toolkit, then of NVIDIA's wheels."""
    patterns = [os.path.join(path, "nvidia", "*", "include") for path in sys.path]
    with contextlib.suppress(NvccNotFoundError):  # a .cu says so; C++ may do with the wheels
        home = toolchain.find_nvcc().home
        patterns[:0] = [f"{home}/include", f"{home}/targets/*/include"]
    folders = [path for pattern in patterns for path in sorted(glob.glob(pattern))]
    # naming /usr/include breaks the C++ library's own include_next
    return [path for path in folders if path != "/usr/include" and os.path.isdir(path)]


def read_exports(texts: Iterable[str]) -> Exports:
    """Returns the names that ``PYBIND11_MODULE`` defines, read off sources without compiling."""
    module, functions, values = "", set(), set()
    for text in texts:
        code = without_comments(text)
        for found in _MODULE.finditer(code):
            module, m = found[1], found[2]
            functions.update(re.findall(rf'\b{m}\s*\.\s*def\s*\(\s*"(\w+)"', code))
            values.update(re.findall(rf'\b{m}\s*\.\s*(?:attr|def_submodule)\s*\(\s*"(\w+)"', code))
            # py::class_<T>(m, "T"), py::enum_<T> e(m, "T"), py::register_exception<T>(m, "T")
            values.update(re.findall(rf'>\s*\w*\s*\(\s*{m}\s*,\s*"(\w+)"', code))
    values = {name for name in values if not name.startswith("__")}
    return Exports(module, tuple(sorted(functions)), tuple(sorted(values - functions)))


def exports(spec: OpSpec) -> Exports:
    """Returns an extension's names: those in ``EXPORTS``, or else all that the sources define."""
    paths = [spec.root / source for source in spec.sources()]
    found = read_exports(path.read_text(encoding="utf-8", errors="replace") for path in paths)
    if not spec.EXPORTS:
        return found
    functions = tuple(name for name in spec.EXPORTS if name not in found.values)
    return Exports(found.module, functions, tuple(n for n in spec.EXPORTS if n in found.values))
