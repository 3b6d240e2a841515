"""Extensions that bind themselves with pybind11 and include torch: flags, key, exports, import.

Such a library links torch and Python, so it is made for the torch and the interpreter at hand and
keyed by both. It is compiled, cached, locked and reported like every other library, not by torch's
own extension loader. Folders are computed here: importing torch.utils.cpp_extension takes longer
than a look-up may, needs setuptools and prints.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import threading
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import DuplicateOpError, HeaderNotFoundError, NvccNotFoundError
from . import extension

if TYPE_CHECKING:
    from ...builder import OpBuilder
    from .archs import Capability

# An extension's numbers are its author's: contraction stays as the compilers have it.
CXX_ARGS = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden"]
NVCC_ARGS = [
    "-std=c++20",
    "-O3",
    "-Xfatbin=-compress-all",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    # what torch.utils.cpp_extension gives every .cu: torch's headers define these themselves
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
    "--expt-relaxed-constexpr",
]

_COMMENT = re.compile(r'("(?:[^"\\\n]|\\.)*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_MODULE = re.compile(r"\bPYBIND11_MODULE\s*\(\s*(\w+)\s*,\s*(\w+)")


class Exports(NamedTuple):
    """Names that an extension's sources define: functions, and classes or values."""

    module: str  # the name in PYBIND11_MODULE, "" without one
    functions: tuple[str, ...]
    values: tuple[str, ...]


def _torch(op: str) -> Any:
    try:
        import torch
    except ImportError as error:
        raise HeaderNotFoundError(
            f'{op}: an op with BINDING = "pybind11" is built against torch, which cannot be'
            f" imported here ({error}); install torch, and pip install with --no-build-isolation"
        ) from error
    return torch


def uses_cuda(builder: OpBuilder) -> bool:
    """Whether the extension is a CUDA one: by its group, or by a .cu among its sources."""
    return builder.INCLUDE_FLAG == "APEX_BUILD_CUDA_OPS" or builder.needs_archs("cpu")


def key_extras(builder: OpBuilder) -> list[str]:
    """The torch and the interpreter that the library is made for."""
    torch = _torch(builder.NAME)
    return [
        extension.soabi(),
        f"torch {torch.__version__}",
        f"C++ ABI {int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"CUDA {torch.version.cuda}",
        f"HIP {torch.version.hip}",
    ]


def compile_flags(builder: OpBuilder, kind: str) -> list[str]:
    """Base flags of one kind of source, without the builder's own."""
    abi = int(_torch(builder.NAME)._C._GLIBCXX_USE_CXX11_ABI)
    return [
        *(NVCC_ARGS if kind == "cuda" else CXX_ARGS),
        f"-DTORCH_EXTENSION_NAME={builder.NAME}",
        "-DTORCH_API_INCLUDE_EXTENSION_H",
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
    ]


def link_flags(builder: OpBuilder) -> list[str]:
    """torch's libraries, which the process has loaded before the extension."""
    torch = _torch(builder.NAME)
    names = ["c10", "torch", "torch_cpu", "torch_python"]
    if uses_cuda(builder):
        for version, suffix in ((torch.version.cuda, "cuda"), (torch.version.hip, "hip")):
            if version is not None:
                names.extend([f"c10_{suffix}", f"torch_{suffix}"])
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    return [f"-L{folder}", *(f"-l{name}" for name in names)]


def include_paths(builder: OpBuilder) -> list[str]:
    """Folders of torch's, Python's and, for a CUDA extension, CUDA's headers."""
    from . import toolchain

    base = os.path.join(os.path.dirname(_torch(builder.NAME).__file__), "include")
    own = os.path.join(base, "torch", "csrc", "api", "include")
    cuda = _cuda_include_paths() if uses_cuda(builder) else []
    return [base, own, toolchain.python_include(), *cuda]


def _cuda_include_paths() -> list[str]:
    """The toolkit's folders, then those of NVIDIA's wheels, which have what a toolkit may lack."""
    import glob

    from . import toolchain

    folders: list[str] = []
    try:
        home = toolchain.find_nvcc().home
    except NvccNotFoundError:
        pass  # a .cu says so; C++ alone may do with the wheels
    else:
        folders.append(os.path.join(home, "include"))
        folders.extend(glob.glob(os.path.join(home, "targets", "*", "include")))
    for path in sys.path:
        folders.extend(sorted(glob.glob(os.path.join(path, "nvidia", "*", "include"))))
    # naming /usr/include breaks the C++ library's own include_next
    return [path for path in folders if path != "/usr/include" and os.path.isdir(path)]


def read_exports(texts: Iterable[str]) -> Exports:
    """What PYBIND11_MODULE defines in the sources' ``texts``, read without compiling."""
    module, functions, values = "", set(), set()
    for text in texts:
        code = _COMMENT.sub(lambda match: match[1] or " ", text)
        for found in _MODULE.finditer(code):
            module, m = found[1], found[2]
            functions.update(re.findall(rf'\b{m}\s*\.\s*def\s*\(\s*"(\w+)"', code))
            values.update(re.findall(rf'\b{m}\s*\.\s*attr\s*\(\s*"(\w+)"', code))
            values.update(re.findall(rf'\b{m}\s*\.\s*def_submodule\s*\(\s*"(\w+)"', code))
            # py::class_<T>(m, "T"), py::enum_<T> e(m, "T"), py::register_exception<T>(m, "T")
            values.update(re.findall(rf'>\s*\w*\s*\(\s*{m}\s*,\s*"(\w+)"', code))
    values = {name for name in values if not name.startswith("__")}
    return Exports(module, tuple(sorted(functions)), tuple(sorted(values - functions)))


def exports(builder: OpBuilder) -> Exports:
    """The builder's EXPORTS if it names some, with what its sources say about their kind."""
    texts = []
    for source in builder.sources():
        with open(builder.root / source, encoding="utf-8", errors="replace") as file:
            texts.append(file.read())
    found = read_exports(texts)
    if not builder.EXPORTS:
        return found
    functions = [name for name in builder.EXPORTS if name not in found.values]
    values = [name for name in builder.EXPORTS if name in found.values]
    return Exports(found.module, tuple(functions), tuple(values))


_lock = threading.RLock()
_modules: dict[str, tuple[OpBuilder, ModuleType]] = {}


def _refuse_taken(builder: OpBuilder, name: str) -> None:
    """Raise ImportError where ``name`` is a module of the package, which this would replace."""
    module = sys.modules.get(name)
    spec = None if module is not None else importlib.util.find_spec(name)
    if module is not None or spec is not None:
        where = getattr(module, "__file__", None) or getattr(spec, "origin", None)
        raise ImportError(
            f"{builder.NAME}: {name} is another module already ({where}); give the op another NAME,"
            " or override absolute_name()",
            name=name,
        )


def _capability(builder: OpBuilder) -> Capability | None:
    """A visible GPU, which the code must run on: no tensor tells the device when it is imported."""
    from .archs import visible_capabilities

    torch = _torch(builder.NAME)
    if not builder.needs_archs("cpu") or (torch.version.cuda or torch.version.hip) is None:
        return None
    devices = visible_capabilities()
    return devices[0] if devices else None


def load(builder: OpBuilder, force: bool = False, verbose: bool = False) -> ModuleType:
    """The extension, found or built and imported once; ``force`` builds and imports it again.

    Raises BuildError; ImportError if it does not import; DuplicateOpError if another builder's
    extension has its name.
    """
    from ..build.service import open_library

    name = builder.absolute_name()
    with _lock:
        known = _modules.get(name)
        if known is not None and known[0].root != builder.root:
            raise DuplicateOpError(
                f"{name}: extensions of {known[0].root} and of {builder.root} have the same name"
            )
        if known is not None and not force:
            return known[1]
        if known is None:
            _refuse_taken(builder, name)
        opened = open_library(builder, "cpu", _capability(builder), force=force, verbose=verbose)
        before = sys.modules.pop(name, None)
        try:
            module = extension.import_module(name, opened)
        except ImportError as error:
            if before is not None:
                sys.modules[name] = before
            raise ImportError(
                f"{builder.NAME}: {opened.path} was built and cannot be imported: {error}"
                " (PYBIND11_MODULE must name TORCH_EXTENSION_NAME or"
                f" {builder.NAME}; libraries_args() adds libraries to link)",
                name=name,
                path=opened.path,
            ) from error
        _modules[name] = (builder, module)
        return module


def _forked() -> None:
    """A fork may copy a lock that another thread held; the child starts with a fresh one."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forked)
