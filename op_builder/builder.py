"""Builders: what an op is made of, and how its libraries are found, built and opened."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

from .jit import env
from .jit.backends import hip, pybind
from .jit.backends.archs import Arch, Capability, initialised_capabilities, own_arch
from .jit.build.service import look_up, open_library
from .jit.errors import UnknownOpError
from .jit.find.cache import OpenedLibrary
from .jit.find.key import compute
from .jit.signatures import FunctionSpec, parse
from .jit.user_ops import register

if TYPE_CHECKING:
    from .jit.build.ninja import Step

# Numbers must not depend on the machine: no contraction, no fast-math, no -march=native. Floating
# point flags and errno are nobody's business here, and keeping them stops vectorization.
# No -fopenmp: kernels reach the OpenMP runtime that torch has loaded through weak symbols.
BASE_CXX_ARGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-trapping-math",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
]
BASE_NVCC_ARGS = [
    "-std=c++17",
    "-O3",
    "-fmad=false",
    "-Xfatbin=-compress-all",
    "-cudart=static",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off,-Wall",
]
BASE_CXX_LIBRARIES = ["-ldl"]
# the static CUDA runtime stays private: several libraries, each with its own, share a process
BASE_NVCC_LIBRARIES = ["-Xlinker=--exclude-libs=ALL", "-ldl"]
_SOURCE_ENDINGS = ("_cpu.cpp", "_cuda.cu")
SUITE = Path(__file__).resolve().parent.parent
INCLUDE_FLAGS = ("APEX_BUILD_CPP_OPS", "APEX_BUILD_CUDA_OPS")


class OpBuilder:
    """Base of all builders; a subclass sets NAME and overrides only what differs.

    ``cxx_args``, ``nvcc_args``, ``include_paths`` and ``libraries_args`` return what is *added* to
    the base flags. ``root`` is the folder that holds ``csrc``: the package, or a checkout. An op
    outside of the suite sets ROOT to a folder of its own; the suite's headers are found there, too.

    BINDING "pybind11" is an extension with a PYBIND11_MODULE in its sources: one library for all
    devices, made for the torch at hand. EXPORTS names what it defines where that cannot be read off
    its sources.
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
        if not cls.NAME.isidentifier():
            raise TypeError(f"{cls.__name__}: NAME must be an identifier, got {cls.NAME!r}")
        if "BUILD_VAR" not in cls.__dict__:
            cls.BUILD_VAR = f"APEX_BUILD_{cls.NAME.upper()}"
        if cls.INCLUDE_FLAG not in INCLUDE_FLAGS:
            raise TypeError(
                f"{cls.__name__}: INCLUDE_FLAG must be one of {INCLUDE_FLAGS},"
                f" got {cls.INCLUDE_FLAG!r}"
            )
        if cls.BINDING not in ("c", "pybind11"):
            raise TypeError(
                f'{cls.__name__}: BINDING must be "c" or "pybind11", got {cls.BINDING!r}'
            )
        if isinstance(cls.EXPORTS, str) or not all(name.isidentifier() for name in cls.EXPORTS):
            raise TypeError(
                f"{cls.__name__}: EXPORTS must be a tuple of identifiers, got {cls.EXPORTS!r}"
            )
        if cls.BINDING == "pybind11":
            cls.DEVICES = ("cpu",)  # one library, whatever devices its functions take

    def __init__(self, root: str | os.PathLike[str] | None = None) -> None:
        self.root = Path(root if root is not None else self.ROOT).resolve()
        self._specs: dict[str, FunctionSpec] | None = None

    # What the op is made of ------------------------------------------------------------------

    def absolute_name(self) -> str:
        """Import name of the module that ``load`` returns."""
        if self.BINDING == "pybind11":
            return f"apex_te.{self.NAME}"
        return f"apex_te.compatibility.{self.NAME}"

    def sources(self) -> list[str]:
        """Source files of all devices relative to the root, found by the op's stem."""
        try:
            names = sorted(os.listdir(self.root / "csrc" / self.NAME))
        except FileNotFoundError:
            return []
        if self.BINDING == "pybind11":
            mine = [name for name in names if name.endswith((".cpp", ".cu"))]
        else:
            mine = [name for name in names if name.startswith(f"{self.NAME}_")]
            mine = [name for name in mine if name.endswith(_SOURCE_ENDINGS)]
        return [f"csrc/{self.NAME}/{name}" for name in mine]

    def include_paths(self) -> list[str]:
        """Further include folders of the project, relative to the root."""
        return []

    def system_include_paths(self, device: str) -> list[str]:
        """Include folders outside the project; asked only when something is compiled."""
        return []

    def cxx_args(self) -> list[str]:
        """Flags for the C++ compiler beyond the base ones."""
        return []

    def nvcc_args(self) -> list[str]:
        """Flags for nvcc beyond the base ones; archs are chosen apart."""
        return []

    def hipcc_args(self) -> list[str]:
        """Flags for hipcc, which takes nvcc's place for AMD GPUs, beyond the base ones."""
        return []

    def libraries_args(self) -> list[str]:
        """Linker flags beyond the base ones."""
        return []

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether this op can be used here: it has sources, and the GPUs in use are new enough."""
        reason = ""
        sources = self.sources()
        lost = [source for source in sources if not (self.root / source).is_file()]
        if not sources:
            reason = f"no sources in {self.root / 'csrc' / self.NAME}{self._root_hint()}"
        elif lost:
            reason = f"{self.root / lost[0]} does not exist"
        elif "cuda" in self.DEVICES:
            old = [device for device in initialised_capabilities() if device < self.min_arch]
            if old:
                reason = f"needs a GPU of arch {Arch(*self.min_arch)} or later, got {Arch(*old[0])}"
        if reason and verbose:
            print(f"apex_te: {self.NAME}: {reason}", file=sys.stderr)
        return not reason

    def functions(self) -> dict[str, FunctionSpec]:
        """The op's functions, name -> (signature, devices), read from ``csrc/<op>/<op>.h``."""
        if self._specs is None:
            header = self.root / "csrc" / self.NAME / f"{self.NAME}.h"
            try:
                text = header.read_text(encoding="utf-8")
            except FileNotFoundError:
                raise UnknownOpError(
                    f"{self.NAME}: its header {header} does not exist{self._root_hint()}"
                ) from None
            self._specs = parse(text)
        return dict(self._specs)

    def exports(self) -> pybind.Exports:
        """What an extension defines: EXPORTS, else what PYBIND11_MODULE in its sources names."""
        return pybind.exports(self)

    # Using it --------------------------------------------------------------------------------

    def builder(self) -> OpBuilder:
        """This object (apex's builders answer so, too)."""
        return self

    def open(self, device: str = "cpu", capability: Capability | None = None) -> OpenedLibrary:
        """The library for ``device``, looked up and, if need be, built. Raises BuildError."""
        return open_library(self, device, capability)

    def find(
        self, device: str = "cpu", capability: Capability | None = None
    ) -> OpenedLibrary | None:
        """The library if it need not be built, else None."""
        self.check_device(device)
        return look_up(self, device, capability)

    def load(self, verbose: bool = False) -> ModuleType:
        """The op's module with its libraries for the devices in use ready.

        An op outside of the suite is known to ``get_builder`` from then on.
        """
        return self._load(verbose, force=False)

    def jit_load(self, verbose: bool = False) -> ModuleType:
        """Like ``load``, but builds even if a library is found."""
        return self._load(verbose, force=True)

    def _load(self, verbose: bool, force: bool) -> ModuleType:
        if self.is_outside:
            register(self)
        if self.BINDING == "pybind11":
            return pybind.load(self, force, verbose)
        for device in self.DEVICES:
            if device == "cpu" or initialised_capabilities():
                open_library(self, device, None, force=force, verbose=verbose)
        return importlib.import_module(self.absolute_name())

    # What the cache and the build ask --------------------------------------------------------

    @property
    def is_outside(self) -> bool:
        """Whether the op is another package's than the suite's."""
        return self.root != SUITE

    def _root_hint(self) -> str:
        if self.is_outside:
            return ""
        return " (an op outside of the suite sets ROOT to the folder that holds its csrc)"

    @property
    def prebuilt_folder(self) -> str:
        """Where an installed package keeps libraries made at install time."""
        return str(self.root / "prebuilt")

    @property
    def exports_c_functions(self) -> bool:
        """True if the dispatcher opens the library, False if Python imports it."""
        return self.BINDING == "c"

    def check_device(self, device: str) -> None:
        """Raise UnknownOpError if the op has no library for ``device``."""
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
        """File name of the library without ``.so``."""
        return self.NAME if self.BINDING == "pybind11" else f"{self.NAME}_{device}"

    def needs_archs(self, device: str) -> bool:
        """Whether the library is made for particular GPU archs."""
        return "cuda" in self.source_kinds(device)

    def needs_hip(self, device: str) -> bool:
        """Whether the library is made by hipcc, for AMD GPUs."""
        return self.needs_archs(device) and hip.is_active()

    def specific_archs(self) -> set[Capability]:
        """Archs with files of their own: ``<op>_sm90_cuda.cu`` is compiled for ``sm_90a``."""
        archs = [own_arch(source) for source in self.sources()]
        return {(arch.major, arch.minor) for arch in archs if arch is not None}

    def device_sources(self, device: str) -> list[str]:
        """The sources of one device's library; an extension module is one library of all."""
        if self.BINDING == "pybind11":
            return self.sources() if device == "cpu" else []
        return [name for name in self.sources() if name.endswith(".cu") == (device == "cuda")]

    def source_kinds(self, device: str) -> list[str]:
        """Which compilers the library needs: "cpu" for C++, "cuda" for nvcc."""
        names = self.device_sources(device)
        return sorted({"cuda" if name.endswith(".cu") else "cpu" for name in names})

    def project_includes(self) -> list[str]:
        """All include folders of the project, relative to the root."""
        return ["csrc", *(path for path in self.include_paths() if path != "csrc")]

    def include_folders(self) -> list[str]:
        """The same with their places; for an op outside of the suite the suite's headers, too."""
        own = [os.path.join(self.root, path) for path in self.project_includes()]
        return [*own, str(SUITE / "csrc")] if self.is_outside else own

    def system_folders(self, device: str) -> list[str]:
        """``system_include_paths`` and what an extension includes of torch and Python."""
        folders = self.system_include_paths(device)
        if self.BINDING == "pybind11":
            folders = [*folders, *pybind.include_paths(self)]
        return folders

    def compile_flags(self, kind: str) -> list[str]:
        """Base flags and the builder's own for one kind of source."""
        if self.BINDING == "pybind11":
            base = pybind.compile_flags(self, kind)
        else:
            base = BASE_NVCC_ARGS if kind == "cuda" else BASE_CXX_ARGS
            if kind == "cuda" and hip.is_active():
                return [*hip.BASE_ARGS, *self.hipcc_args()]
        if kind == "cuda":
            return [*base, *self.nvcc_args()]
        return [*base, *self.cxx_args(), *env.sanitizers()]

    def link_flags(self, kind: str) -> list[str]:
        """The builder's own linker flags and the base ones."""
        base = BASE_NVCC_LIBRARIES if kind == "cuda" else BASE_CXX_LIBRARIES
        if kind == "cuda" and hip.is_active():
            base = hip.BASE_LIBRARIES
        binding = pybind.link_flags(self) if self.BINDING == "pybind11" else []
        sanitizers = env.sanitizers() if kind == "cpu" else []
        return [*self.libraries_args(), *binding, *base, *sanitizers]

    def key_flags(self, device: str) -> list[str]:
        """All flags that shape the library, without archs and folders of the system."""
        kinds = self.source_kinds(device) or ["cpu"]
        flags = [flag for kind in kinds for flag in self.compile_flags(kind)]
        includes = [f"-I{path}" for path in self.project_includes()]
        return [*flags, *includes, *self.link_flags(kinds[-1])]

    def key_extras(self) -> list[str]:
        """What else the library depends on; nothing for a plain op."""
        return pybind.key_extras(self) if self.BINDING == "pybind11" else []

    def all_key_extras(self, device: str) -> list[str]:
        """``key_extras`` and what AMD's libraries depend on."""
        return [*self.key_extras(), *(hip.key_extras() if self.needs_hip(device) else [])]

    def key(self, device: str) -> str:
        """The cache key of the library for ``device``."""
        root = str(self.root)
        try:
            return compute(
                self.NAME,
                device,
                root,
                [os.path.join(root, source) for source in self.device_sources(device)],
                self.include_folders(),
                self.key_flags(device),
                self.all_key_extras(device),
                str(SUITE) if self.is_outside else "",
            )
        except FileNotFoundError as error:
            raise UnknownOpError(f"{self.NAME}: {error}") from None

    def compiler_version(self, device: str, archs: Sequence[Arch]) -> str:
        """Version of the compiler in use; raises where there is none."""
        from .jit.backends import toolchain

        if not self.needs_archs(device):
            return toolchain.cxx_version()
        if hip.is_active():
            return toolchain.hipcc_version()
        nvcc = toolchain.find_nvcc()
        toolchain.check_archs(nvcc, [arch.number for arch in archs])
        return f"{toolchain.nvcc_version()}, {toolchain.cxx_version()}"

    def why_missing(self, device: str) -> str:
        """Why the library is not found although others are, "" where there is nothing to say."""
        return ""

    def build_steps(
        self, device: str, archs: Sequence[Arch], folder: str, output: str
    ) -> list[Step]:
        """The commands that compile and link the library into ``output``."""
        from .jit.backends import steps

        return steps.library(self, device, archs, folder, output)


class CPUOpBuilder(OpBuilder):
    """An op with a CPU library only."""

    INCLUDE_FLAG = "APEX_BUILD_CPP_OPS"
    DEVICES = ("cpu",)


class CUDAOpBuilder(OpBuilder):
    """An op with a CPU and a CUDA library."""

    INCLUDE_FLAG = "APEX_BUILD_CUDA_OPS"
    DEVICES: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
