"""Import finders by which the modules of a package of apex_te get a second name.

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
from .names import MARK, Alias


def share(alias: Alias) -> None:
    """Enters all imported modules of the alias in ``sys.modules`` by their second names, too."""
    for name, module in list(sys.modules.items()):
        second = alias.second_name(name)
        if second is not None:
            sys.modules.setdefault(second, module)


class AliasLoader:
    """Loader that returns a module of apex_te instead of making a module."""

    def __init__(
        self, alias: Alias, target: str, loaded: Callable[[Alias], None] | None = None
    ) -> None:
        self._alias = alias
        self._target = target
        self._loaded = loaded
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._target)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # which the import system has replaced
        share(self._alias)
        if self._loaded is not None:
            self._loaded(self._alias)


class PackageFinder:
    """Finder of an alias's package and of its distribution."""

    def __init__(self, alias: Alias, imported: Callable[[Alias], None]) -> None:
        self._alias = alias
        self._imported = imported

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != self._alias.name:
            return None
        return _spec(self._alias, fullname, self._alias.target, self._imported)

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterator[Distribution]:
        """Yields the alias's distribution, for ``importlib.metadata``."""
        if named_in(DistributionFinder.Context() if context is None else context, self._alias):
            yield AliasDistribution(self._alias, claimed_version(self._alias))


class SubmoduleFinder:
    """Finder of the modules below an alias's package while that name stands for apex_te's package.

    It also finds the alias's extensions, as some frameworks import those only after the package.

    It belongs at the beginning of ``sys.meta_path``: the finder of files would take a submodule's
    file, which lies in the package's folder, for another module.
    """

    def __init__(self, alias: Alias) -> None:
        self._alias = alias

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        alias = self._alias
        if not hasattr(sys.modules.get(alias.name), MARK):
            return None
        if fullname in alias.extensions:
            return _spec(alias, fullname, alias.extensions[fullname])
        target = alias.served_by(fullname)
        if target is None or fullname == alias.name:
            return None
        return _spec(alias, fullname, target)


def _spec(
    alias: Alias, name: str, target: str, loaded: Callable[[Alias], None] | None = None
) -> ModuleSpec | None:
    """Returns the import spec of a module by its second name, None for any other name."""
    found = importlib.util.find_spec(target)
    if found is None:
        return None
    package = found.submodule_search_locations is not None
    loader: Any = AliasLoader(alias, target, loaded)
    return ModuleSpec(name, loader, origin=found.origin, is_package=package)
