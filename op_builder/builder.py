"""Builders: ops that can be looked up, built and opened."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import ClassVar

from .jit.backends import library, pybind
from .jit.backends.archs import Arch, Capability, initialised_capabilities
from .jit.backends.steps import Step
from .jit.build import extension
from .jit.build.service import open_library
from .jit.errors import DuplicateOpError, UnknownOpError
from .jit.find.entry import OpenedLibrary
from .jit.find.key import key_of
from .jit.find.look_up import look_up
from .spec import DISPATCHER, OpSpec


class OpBuilder(OpSpec):
    """An op that can be built: base of all builders, with what to declare in ``OpSpec``."""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Returns True if the op has sources and the GPUs in use are new enough for it."""
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

    def exports(self) -> pybind.Exports:
        """Returns the names that an extension defines, read off its sources or ``EXPORTS``."""
        return pybind.exports(self)

    def builder(self) -> OpBuilder:
        """Returns this object (apex's builders answer so, too)."""
        return self

    def open(self, device: str = "cpu", capability: Capability | None = None) -> OpenedLibrary:
        """Returns the library for ``device``, looked up and, if need be, built.

        Raises:
            BuildError: the library cannot be found or built.
        """
        return open_library(self, device, capability)

    def find(
        self, device: str = "cpu", capability: Capability | None = None
    ) -> OpenedLibrary | None:
        """Returns the library if it need not be built, else None."""
        self.check_device(device)
        return look_up(self, device, capability)

    def load(self, verbose: bool = False) -> ModuleType:
        """Returns the op's module with its libraries for the devices in use ready.

        An op outside of the suite is known to ``get_builder`` from then on.
        """
        return self._load(verbose, force=False)

    def jit_load(self, verbose: bool = False) -> ModuleType:
        """Builds even if a library is found, and returns the op's module."""
        return self._load(verbose, force=True)

    def _load(self, verbose: bool, force: bool) -> ModuleType:
        if self.is_outside:
            register(self)
        if self.BINDING == "pybind11":
            return extension.load(self, force, verbose)
        for device in self.DEVICES:
            if device == "cpu" or initialised_capabilities():
                open_library(self, device, None, force=force, verbose=verbose)
        return importlib.import_module(self.absolute_name())

    def key(self, device: str) -> str:
        """Returns the cache key of the library for ``device``."""
        return key_of(self, device)

    def compile_flags(self, kind: str) -> list[str]:
        """Returns the base flags and the op's own for one kind of source, "cpu" or "cuda"."""
        return library.compile_flags(self, kind)

    def key_flags(self, device: str) -> list[str]:
        """Returns all flags that shape the library, without archs and folders of the system."""
        return library.key_flags(self, device)

    def compiler_version(self, device: str, archs: Sequence[Arch] = ()) -> str:
        """Returns the version of the compiler in use; raises ``BuildError`` without one."""
        return library.compiler_version(self, device, archs)

    def build_steps(
        self, device: str, archs: Sequence[Arch], folder: str, output: str
    ) -> list[Step]:
        """Returns the commands that compile and link the library into ``output``."""
        return library.build_steps(self, device, archs, folder, output)


class CPUOpBuilder(OpBuilder):
    """An op with a CPU library only."""

    INCLUDE_FLAG = "APEX_BUILD_CPP_OPS"
    DEVICES = ("cpu",)


class CUDAOpBuilder(OpBuilder):
    """An op with a CPU and a CUDA library."""

    INCLUDE_FLAG = "APEX_BUILD_CUDA_OPS"
    DEVICES: ClassVar[tuple[str, ...]] = ("cpu", "cuda")


_NOT_OPS = frozenset(("__init__", "builder", "core", "spec", "user_ops"))
registered: dict[str, OpBuilder] = {}  # ops outside of the suite that this process knows


def builder_names() -> list[str]:
    """Returns the names of the suite's ops, found by looking at this folder."""
    names = (os.path.splitext(entry) for entry in os.listdir(os.path.dirname(__file__)))
    return sorted(stem for stem, ending in names if ending == ".py" and stem not in _NOT_OPS)


def suite_names() -> list[str]:
    """Returns the names that no op outside of the suite may have."""
    return [*builder_names(), DISPATCHER]


def _place(builder: OpBuilder) -> str:
    """Returns where a builder is defined, as messages name it."""
    cls = type(builder)
    file = getattr(sys.modules.get(cls.__module__), "__file__", None) or "?"
    return f"{cls.__module__}.{cls.__qualname__} ({file})"


def register(builder: OpBuilder | type[OpBuilder]) -> OpBuilder:
    """Makes an op outside of the suite known to ``get_builder`` in this process.

    Args:
        builder: a builder, or its class.

    Returns:
        The builder.

    Raises:
        UnknownOpError: the builder has no NAME.
        DuplicateOpError: another builder has its NAME.
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
