"""Base class in which an op declares its name, sources, flags and functions."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import ClassVar, NamedTuple

from .jit.backends.archs import Capability, own_arch
from .jit.errors import BuildError, UnknownOpError

SUITE = Path(__file__).resolve().parent.parent
INCLUDE_FLAGS = ("APEX_BUILD_CPP_OPS", "APEX_BUILD_CUDA_OPS")
CPU_OPS = "APEX_BUILD_CPU_OPS"  # what ROCm apex's README writes for the first of them
DISPATCHER = "apex_te_core"
JAX_HANDLERS = "apex_te_jax"
_SOURCE_ENDINGS = ("_cpu.cpp", "_cuda.cu")
_LITERAL = r'"(?:[^"\\\n]|\\.)*"'
_COMMENT = re.compile(rf"({_LITERAL})|//[^\n]*|/\*.*?\*/", re.DOTALL)
_FUNCTION = re.compile(
    rf'\bAPEX_TE_FUNCTION\(\s*(\w+)\s*,\s*((?:{_LITERAL}\s*)+)(?:,\s*"(cpu|cuda)"\s*)?\)'
)


class FunctionSpec(NamedTuple):
    """A C function of an op as its header declares it with ``APEX_TE_FUNCTION``."""

    signature: str  # "x: Tensor, y: Tensor!", or with contracts "x: T[r c], y: T[r c]!"
    devices: tuple[str, ...]  # whose library defines the function: "cpu", "cuda" or both


def without_comments(code: str) -> str:
    """Returns C++ code with a blank in place of each comment; string literals stay."""
    return _COMMENT.sub(lambda match: match[1] or " ", code)


def parse_functions(text: str) -> dict[str, FunctionSpec]:
    """Returns the functions that a header declares with ``APEX_TE_FUNCTION``, by name."""
    found = {}
    for name, literals, device in _FUNCTION.findall(without_comments(text)):
        parts = [literal[1:-1] for literal in re.findall(_LITERAL, literals)]
        signature = "".join(parts).replace('\\"', '"').replace("\\\\", "\\")
        found[name] = FunctionSpec(signature, (device,) if device else ("cpu", "cuda"))
    return found


class OpSpec:
    """Declaration of one op; a subclass sets ``NAME`` and overrides only what differs.

    ``cxx_args``, ``nvcc_args``, ``hipcc_args``, ``include_paths`` and ``libraries_args`` return
    what is *added* to the base flags.

    Attributes:
        NAME: name of the op, of its folder in ``csrc`` and of its libraries; "" for a base class.
        BUILD_VAR: environment variable that asks for the op at install time; by default
            ``APEX_BUILD_<NAME>``.
        INCLUDE_FLAG: environment variable of the group the op belongs to, one of ``INCLUDE_FLAGS``
            or of a group of its own; a pybind11 extension of the CUDA group is compiled with CUDA's
            headers and linked with torch's CUDA libraries.
        BINDING: "c" for libraries of plain C functions that the dispatcher opens; "pybind11" for an
            extension with a ``PYBIND11_MODULE`` in its sources: one library for all devices, made
            for the installed torch, which Python imports.
        EXPORTS: all names that a pybind11 extension defines; () to find the names in its sources.
        DEVICES: devices the op has a library for, "cpu" and "cuda"; ("cpu",) for any extension.
        min_arch: least compute capability, ``(major, minor)``, of NVIDIA GPUs the op runs on.
        ROOT: folder that holds ``csrc``; an op of another package sets ``ROOT`` to a folder of that
            package, and may include apex_te's headers, too.
        root: ``ROOT`` or the constructor's argument, as an absolute path.
    """

    NAME: ClassVar[str] = ""
    BUILD_VAR: ClassVar[str] = ""
    INCLUDE_FLAG: ClassVar[str] = "APEX_BUILD_CPP_OPS"
    BINDING: ClassVar[str] = "c"
    EXPORTS: ClassVar[tuple[str, ...]] = ()
    DEVICES: ClassVar[tuple[str, ...]] = ("cpu",)
    min_arch: ClassVar[Capability] = (8, 0)
    ROOT: ClassVar[str | os.PathLike[str]] = SUITE

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not cls.NAME:
            return
        if cls.INCLUDE_FLAG == CPU_OPS:
            cls.INCLUDE_FLAG = INCLUDE_FLAGS[0]
        names = (cls.EXPORTS,) if isinstance(cls.EXPORTS, str) else cls.EXPORTS
        exports = names is cls.EXPORTS and all(map(str.isidentifier, names))
        group = str(cls.INCLUDE_FLAG).isidentifier()
        for name, wanted, fits in (
            ("NAME", "an identifier", cls.NAME.isidentifier()),
            ("INCLUDE_FLAG", "the name of an environment variable", group),
            ("BINDING", '"c" or "pybind11"', cls.BINDING in ("c", "pybind11")),
            ("EXPORTS", "a tuple of identifiers", exports),
        ):
            if not fits:
                raise TypeError(
                    f"{cls.__name__}: {name} must be {wanted}, got {getattr(cls, name)!r}"
                )
        if "BUILD_VAR" not in cls.__dict__:
            cls.BUILD_VAR = f"APEX_BUILD_{cls.NAME.upper()}"
        if cls.BINDING == "pybind11":
            cls.DEVICES = ("cpu",)  # one library, whatever devices its functions take

    def __init__(
        self, root: str | os.PathLike[str] | None = None, *, name: str | None = None
    ) -> None:
        """Declares the op with its sources below ``root``, by default below ``ROOT``.

        Args:
            root: folder that holds ``csrc``.
            name: ``NAME``, as builders written for ROCm's apex pass it; such an op is a pybind11
                extension unless its class says otherwise.

        Raises:
            TypeError: ``name`` is not ``NAME``.
        """
        cls = type(self)
        if name is not None and name != self.NAME:
            raise TypeError(f"{cls.__name__}: name must be NAME = {self.NAME!r}, got {name!r}")
        if name and not any("BINDING" in base.__dict__ for base in cls.__mro__ if base != OpSpec):
            cls.BINDING, cls.DEVICES = "pybind11", ("cpu",)
        self.name = self.NAME
        self.root = Path(root if root is not None else self.ROOT).resolve()
        self._functions: dict[str, FunctionSpec] | None = None

    def absolute_name(self) -> str:
        """Returns the import name of the Python module that the builder's ``load`` returns."""
        if self.BINDING == "pybind11":
            return f"apex_te.{self.NAME}"
        return f"apex_te.compatibility.{self.NAME}"

    def sources(self) -> list[str]:
        """Returns the source files of all devices, sorted, as paths relative to ``root``.

        They are the files ``csrc/<op>/<op>_*_cpu.cpp``, ``csrc/<op>/<op>_*_cuda.cu`` and those
        without a middle part; for an extension all ``.cpp`` and ``.cu`` files of ``csrc/<op>``.

        Raises:
            BuildError: the folder has a ``.cpp`` or ``.cu`` file of another name.
        """
        try:
            names = sorted(os.listdir(self.root / "csrc" / self.NAME))
        except FileNotFoundError:
            return []
        mine = [name for name in names if name.endswith((".cpp", ".cu"))]
        for name in mine if self.BINDING == "c" else ():
            if not (name.startswith(f"{self.NAME}_") and name.endswith(_SOURCE_ENDINGS)):
                raise BuildError(
                    f"{self.NAME}: csrc/{self.NAME} must have sources named "
                    f"{self.NAME}_*_cpu.cpp and {self.NAME}_*_cuda.cu alone, got {name}"
                )
        return [f"csrc/{self.NAME}/{name}" for name in mine]

    def include_paths(self) -> list[str]:
        """Returns include folders beside ``csrc``, relative to ``root``; none by default."""
        return []

    def system_include_paths(self, device: str) -> list[str]:
        """Returns include folders outside the project; a look-up never calls this method."""
        return []

    def cxx_args(self) -> list[str]:
        """Returns flags that the op adds to the C++ compiler's base flags; none by default."""
        return []

    def nvcc_args(self) -> list[str]:
        """Returns flags that the op adds to nvcc's base flags, without archs; none by default."""
        return []

    def hipcc_args(self) -> list[str]:
        """Returns flags that the op adds to the base flags of hipcc, the compiler for AMD GPUs."""
        return []

    def libraries_args(self) -> list[str]:
        """Returns flags that the op adds to the linker's base flags; none by default."""
        return []

    def key_extras(self) -> list[str]:
        """Returns further texts that take part in the cache key; none by default."""
        return []

    def functions(self) -> dict[str, FunctionSpec]:
        """Returns the op's C functions by name, read from ``csrc/<op>/<op>.h``.

        Raises:
            UnknownOpError: the header does not exist.
        """
        if self._functions is None:
            header = self.root / "csrc" / self.NAME / f"{self.NAME}.h"
            try:
                text = header.read_text(encoding="utf-8")
            except FileNotFoundError:
                raise UnknownOpError(
                    f"{self.NAME}: its header {header} does not exist{self._root_hint()}"
                ) from None
            self._functions = parse_functions(text)
        return dict(self._functions)

    @property
    def is_outside(self) -> bool:
        """True if another package than apex_te declares the op."""
        return self.root != SUITE

    def _root_hint(self) -> str:
        """Returns advice to set ``ROOT``, for messages about missing files; "" if it is set."""
        if self.is_outside:
            return ""
        return " (an op outside of the suite sets ROOT to the folder that holds its csrc)"

    @property
    def prebuilt_folder(self) -> str:
        """Folder of the installed package in which libraries compiled at install time lie."""
        return str(self.root / "prebuilt")

    def check_device(self, device: str) -> None:
        """Raises ``UnknownOpError`` if the op is not implemented for ``device``."""
        if device not in self.DEVICES:
            raise UnknownOpError(
                f"{self.NAME}: device must be one of {', '.join(self.DEVICES)}, got {device!r}"
            )
        if not self.device_sources(device):
            raise UnknownOpError(
                f"{self.NAME}: there is no {device} source in {self.root / 'csrc' / self.NAME}"
                f"{self._root_hint()}"
            )

    def library_name(self, device: str) -> str:
        """Returns the file name, without ``.so``, of the library for ``device``."""
        return self.NAME if self.BINDING == "pybind11" else f"{self.NAME}_{device}"

    def built_devices(self) -> list[str]:
        """Returns the devices, "cpu" and "cuda", for which the op has sources and so a library."""
        return [device for device in self.DEVICES if self.device_sources(device)]

    def needs_archs(self, device: str) -> bool:
        """Returns True if the library for ``device`` has GPU code, compiled for chosen archs."""
        return "cuda" in self.source_kinds(device)

    def specific_archs(self) -> set[Capability]:
        """Returns the capabilities for which the op has a source: (9, 0) for ``*_sm90_cuda.cu``."""
        archs = [own_arch(source) for source in self.sources()]
        return {(arch.major, arch.minor) for arch in archs if arch is not None}

    def device_sources(self, device: str) -> list[str]:
        """Returns the library's sources relative to ``root``; an extension's are all of "cpu"."""
        if self.BINDING == "pybind11":
            # headers, which apex's lists of sources name, too, are not compiled
            every = [name for name in self.sources() if not name.endswith((".h", ".hpp", ".cuh"))]
            return every if device == "cpu" else []
        return [name for name in self.sources() if name.endswith(".cu") == (device == "cuda")]

    def source_kinds(self, device: str) -> list[str]:
        """Returns the kinds of the library's sources: "cpu" for C++, "cuda" for nvcc or hipcc."""
        names = self.device_sources(device)
        return sorted({"cuda" if name.endswith(".cu") else "cpu" for name in names})

    def project_includes(self) -> list[str]:
        """Returns the op's own include folders, with ``csrc`` first, relative to ``root``."""
        return ["csrc", *(path for path in self.include_paths() if path != "csrc")]

    def include_folders(self) -> list[str]:
        """Returns the absolute paths of the op's include folders, and last apex_te's ``csrc``."""
        own = [os.path.join(self.root, path) for path in self.project_includes()]
        return [*own, str(SUITE / "csrc")] if self.is_outside else own


class JaxHandlersSpec(OpSpec):
    """Declaration of the handler library, which serves all versions of Python and jaxlib."""

    NAME = JAX_HANDLERS
    BUILD_VAR = "APEX_BUILD_CPP_OPS"  # as the dispatcher, it goes along with whatever is prebuilt

    def absolute_name(self) -> str:
        return "apex_te.jax"

    def sources(self) -> list[str]:
        return ["csrc/jax_ffi/jax_ffi.cpp"]
