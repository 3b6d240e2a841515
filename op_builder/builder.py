"""Base classes of builders, and the register of the ops of other packages."""

from __future__ import annotations

import importlib
import os
import re
import sys
from types import ModuleType
from typing import ClassVar

from .apex_members import ApexMembers
from .builtin import OPS
from .jit.backends import library, pybind
from .jit.backends.archs import Arch, Capability, initialised_capabilities
from .jit.build.service import load_extension, open_library
from .jit.errors import BuildError, DuplicateOpError, UnknownOpError
from .jit.find.cache import OpenedLibrary, look_up
from .jit.find.key import key_of
from .jit.platform import text_of
from .jit.text import tell
from .spec import DISPATCHER, JAX_HANDLERS, OpSpec


class OpBuilder(ApexMembers, OpSpec):
    """Base of all builders: an op whose libraries can be looked up, compiled and opened.

    A subclass declares the op by the attributes and methods of ``OpSpec``.
    """

    def is_compatible(self, verbose: bool = False) -> bool:
        """Returns True if the op's sources exist and no GPU that torch uses is too old for it.

        With ``verbose`` the reason for False is printed on stderr.
        """
        reason = ""
        sources = self.sources()
        lost = [source for source in sources if not (self.root / source).is_file()]
        old = [gpu for gpu in initialised_capabilities() if gpu < self.min_arch]
        if not sources:
            reason = f"no sources in {self.root / 'csrc' / self.NAME}{self._root_hint()}"
        elif lost:
            reason = f"{self.root / lost[0]} does not exist"
        elif old and "cuda" in self.DEVICES:
            reason = f"needs a GPU of arch {Arch(*self.min_arch)} or later, got {Arch(*old[0])}"
        if reason and verbose:
            tell(f"apex_te: {self.NAME}: {reason}")
        return not reason

    # What a build computes of an op.
    key = key_of
    compile_flags = library.compile_flags
    key_flags = library.key_flags
    compiler_version = library.compiler_version
    build_steps = library.build_steps
    exports = pybind.exports

    def builder(self) -> OpBuilder:
        """Returns this builder, for code that calls ``builder()`` on apex's builders."""
        return self

    def is_supported(self) -> bool:
        """Returns True if the op ``is_compatible``; the name in apex's CUDA builders."""
        return self.is_compatible()

    def open(self, device: str = "cpu", capability: Capability | None = None) -> OpenedLibrary:
        """Returns the opened library for ``device``, which is compiled if no cache holds it.

        Args:
            device, capability: as in ``find``.

        Raises:
            UnknownOpError: the op is not implemented for ``device``.
            BuildError: compiling failed.
        """
        return open_library(self, device, capability)

    def find(
        self, device: str = "cpu", capability: Capability | None = None
    ) -> OpenedLibrary | None:
        """Returns the opened library for ``device`` if a cache holds it, else None; never compiles.

        Args:
            device: "cpu" or "cuda".
            capability: compute capability of the GPU that the library must run on; by default the
                library must hold the archs that the environment lists, if it lists any.

        Raises:
            UnknownOpError: the op is not implemented for ``device``.
        """
        self.check_device(device)
        return look_up(self, device, capability)

    def load(self, verbose: bool = False) -> ModuleType:
        """Returns the op's Python module, its libraries looked up and, if need be, compiled.

        The libraries are those for the CPU and, where torch has initialised CUDA, for the GPU. The
        module is the extension itself for ``BINDING = "pybind11"``, else
        ``apex_te.compatibility.<op>``. An op outside of the suite is registered, so that
        ``get_builder`` finds it from then on.

        Args:
            verbose: shows the compiler commands.

        Raises:
            BuildError: the op's ``is_compatible`` is False, or compiling failed.
        """
        return self._load(verbose, force=False)

    def jit_load(self, verbose: bool = False) -> ModuleType:
        """Compiles what ``load`` would look up, and returns the op's Python module.

        Args:
            verbose: shows the compiler commands.

        Raises:
            BuildError: the op's ``is_compatible`` is False, or compiling failed.
        """
        return self._load(verbose, force=True)

    def _load(self, verbose: bool, force: bool) -> ModuleType:
        """Returns the op's Python module, as ``load`` or, with ``force``, ``jit_load`` does."""
        if type(self).is_compatible is not OpBuilder.is_compatible and not self.is_compatible():
            reason = f": {self.error_log}" if self.error_log else ""
            raise BuildError(f"{self.NAME}: its builder's is_compatible() is False{reason}")
        if self.is_outside:
            register(self)
        if self.BINDING == "pybind11":
            return load_extension(self, force, verbose)
        for device in self.DEVICES:
            if device == "cpu" or initialised_capabilities():
                open_library(self, device, None, force=force, verbose=verbose)
        return importlib.import_module(self.absolute_name())


class CPUOpBuilder(OpBuilder):
    """Base of builders of ops that have a library for the CPU alone."""

    INCLUDE_FLAG = "APEX_BUILD_CPP_OPS"
    DEVICES = ("cpu",)


class CUDAOpBuilder(OpBuilder):
    """Base of builders of ops that have one library for the CPU and one for GPUs."""

    INCLUDE_FLAG = "APEX_BUILD_CUDA_OPS"
    DEVICES: ClassVar[tuple[str, ...]] = ("cpu", "cuda")


_NOT_OPS = frozenset(
    ("__init__", "apex_members", "apex_names", "builder", "builtin", "core", "spec", "user_ops")
)
_NAME = re.compile(r"""^[ \t]+NAME\b[^=\n]*=\s*['"](\w+)['"]""", re.MULTILINE)
registered: dict[str, OpBuilder] = {}  # ops outside of the suite that this process knows


def added() -> dict[str, str]:
    """Returns this folder's modules that users added, by their builders' NAME or else their own."""
    folder = os.path.dirname(__file__)
    found = {}
    for stem, ending in sorted(map(os.path.splitext, os.listdir(folder))):
        if ending == ".py" and stem not in _NOT_OPS:
            names = _NAME.findall(text_of(os.path.join(folder, f"{stem}.py")))
            found.update(dict.fromkeys(names or [stem], stem))
    return found


def builder_names() -> list[str]:
    """Returns the sorted names of the suite's ops: the table's, and those of added builders."""
    return sorted({*OPS, *added()})


def suite_names() -> list[str]:
    """Returns the names of all libraries of the suite, which others' ops must not have."""
    return [*builder_names(), DISPATCHER, JAX_HANDLERS]


def _place(builder: OpBuilder) -> str:
    cls = type(builder)
    file = getattr(sys.modules.get(cls.__module__), "__file__", None) or "?"
    return f"{cls.__module__}.{cls.__qualname__} ({file})"


def register(builder: OpBuilder | type[OpBuilder]) -> OpBuilder:
    """Makes an op of another package known to ``get_builder`` in this process.

    Args:
        builder: a builder, or its class, which is then instantiated.

    Returns:
        The builder.

    Raises:
        UnknownOpError: the builder has no NAME.
        DuplicateOpError: the suite, or a builder defined elsewhere, has its NAME.
    """
    made = builder() if isinstance(builder, type) else builder
    name = made.NAME
    if not name:
        raise UnknownOpError(f"{_place(made)}: a builder must have a NAME to be registered")
    other = registered.get(name)
    # one class may have been reloaded meanwhile
    if other is not None and (_place(made), made.root) != (_place(other), other.root):
        raise DuplicateOpError(
            f"two builders have NAME = {name!r}: {_place(other)}, {_place(made)}"
        )
    if other is None and name in suite_names():
        raise DuplicateOpError(f"{_place(made)}: the suite has an op {name!r} already")
    registered[name] = made
    return made
