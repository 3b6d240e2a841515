"""Lazy names of a package, imported when they are first used, so that importing it is quick."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from typing import Any


def attach(
    package: str, names: dict[str, str], beside: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns ``__getattr__`` and ``__dir__`` for a package that import its names on first use.

    ``names`` gives the submodule that defines each name, "" for a submodule itself. Without any, a
    package only gets hints for misspelt names.
    """

    def get(name: str) -> Any:
        where = names.get(name)
        if where is None:
            known = {*names, *getattr(sys.modules[package], "__all__", ())}
            raise _unknown(package, name, known, beside)
        if not where:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(f"{package}.{where}"), name)
        setattr(sys.modules[package], name, value)
        return value

    def names_of() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    return get, names_of


def attach_submodules(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns ``__getattr__`` and ``__dir__`` for a package that import submodules on first use."""

    def found() -> set[str]:
        import pkgutil  # here, because importing it takes a while

        modules = pkgutil.iter_modules(sys.modules[package].__path__)
        return {module.name for module in modules if not module.name.startswith("_")}

    def get(name: str) -> Any:
        if name.startswith("_") or name not in found():
            raise _unknown(package, name, found())
        return importlib.import_module(f"{package}.{name}")

    def names_of() -> list[str]:
        return sorted({*vars(sys.modules[package]), *found()})

    return get, names_of


def _unknown(package: str, name: str, known: Iterable[str], beside: str = "") -> AttributeError:
    """Returns the error for a name that a package does not have."""
    hint = ""
    if not name.startswith("_"):  # which Python and tools ask for
        from .named_arguments import did_you_mean

        hint = did_you_mean(name, known)
        if beside and name in importlib.import_module(f"{package}.{beside}").__all__:
            hint = f"; it is {package}.{beside}.{name}"
    # Without an object, of which Python would print a guess of its own behind this one.
    return AttributeError(
        f"module {package!r} has no attribute {name!r}{hint}", name=name, obj=None
    )
