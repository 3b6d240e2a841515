"""Lazy names of a package, imported when they are first used, so that importing it is quick."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["attach", "attach_submodules"]


def attach(
    package: str, names: dict[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns ``__getattr__`` and ``__dir__`` for a package that import its names on first use.

    Args:
        package: full name of the package.
        names: for each public name the submodule that defines it; an empty string if the name is
            itself a submodule.

    Returns:
        get: to be assigned to the package's ``__getattr__``.
        names_of: to be assigned to the package's ``__dir__``.
    """

    def get(name: str) -> Any:
        where = names.get(name)
        if where is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not where:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(f"{package}.{where}"), name)
        setattr(sys.modules[package], name, value)
        return value

    def names_of() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    return get, names_of


def attach_submodules(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns ``__getattr__`` and ``__dir__`` for a package that import submodules on first use.

    Args:
        package: full name of the package; its modules without a leading underscore are found.

    Returns:
        get: to be assigned to the package's ``__getattr__``.
        names_of: to be assigned to the package's ``__dir__``.
    """

    def found() -> set[str]:
        import pkgutil  # here, because importing it takes a while

        modules = pkgutil.iter_modules(sys.modules[package].__path__)
        return {module.name for module in modules if not module.name.startswith("_")}

    def get(name: str) -> Any:
        if name.startswith("_") or name not in found():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return importlib.import_module(f"{package}.{name}")

    def names_of() -> list[str]:
        return sorted({*vars(sys.modules[package]), *found()})

    return get, names_of
