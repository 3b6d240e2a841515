"""Import finders by which the modules of ``apex_te.integrations.transformer_engine`` get two names.

A module is one object under both names, so that an attribute that a framework replaces is replaced
for all.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType
from typing import Any

from .metadata import AliasDistribution, claimed_version, named_in

NAME = "transformer_engine"
EXTENSION = f"{NAME}_torch"  # Transformer Engine's module of compiled functions
SHIMS = __name__.rpartition(".te_alias")[0] + ".transformer_engine"
# Attribute that tells the alias's package, the shim or a stub, from a real one.
MARK = "__apex_te_alias__"


def share() -> None:
    """Enters all shim modules that are imported in ``sys.modules`` by their second names, too."""
    for name, module in list(sys.modules.items()):
        if name == SHIMS or name.startswith(f"{SHIMS}."):
            sys.modules.setdefault(NAME + name.removeprefix(SHIMS), module)


class AliasLoader:
    """Loader that returns the shim module instead of making a module."""

    def __init__(self, shim: str, loaded: Callable[[], None] | None = None) -> None:
        self._shim = shim
        self._loaded = loaded
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._shim)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # which the import system has replaced
        share()
        if self._loaded is not None:
            self._loaded()


class PackageFinder:
    """Finder of the package ``transformer_engine`` and of its distribution."""

    def __init__(self, imported: Callable[[], None]) -> None:
        self._imported = imported

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != NAME:
            return None
        return _spec(fullname, SHIMS, self._imported)

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterator[Distribution]:
        """Yields the alias's distribution, for ``importlib.metadata``."""
        if named_in(DistributionFinder.Context() if context is None else context):
            yield AliasDistribution(claimed_version())


class SubmoduleFinder:
    """Finder of the modules below ``transformer_engine`` while that name stands for the shims.

    It also finds ``EXTENSION``, as some frameworks import only after ``transformer_engine``.

    It belongs at the beginning of ``sys.meta_path``: the finder of files would take a submodule's
    file, which lies in the package's folder, for another module.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not hasattr(sys.modules.get(NAME), MARK):
            return None
        if fullname == EXTENSION:
            return _spec(fullname, f"{SHIMS}._torch_extension")
        if not fullname.startswith(f"{NAME}."):
            return None
        return _spec(fullname, SHIMS + fullname.removeprefix(NAME))


def _spec(name: str, shim: str, loaded: Callable[[], None] | None = None) -> ModuleSpec | None:
    """Returns the import spec of a shim module by its second name, None for any other name."""
    found = importlib.util.find_spec(shim)
    if found is None:
        return None
    package = found.submodule_search_locations is not None
    loader: Any = AliasLoader(shim, loaded)
    return ModuleSpec(name, loader, origin=found.origin, is_package=package)
