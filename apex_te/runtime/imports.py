"""Imports of the package: lazy names, folders beside it, former names, the required torch."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, MutableSequence
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


def extend(package_path: MutableSequence[str]) -> str:
    """Makes op_builder and compatibility subpackages; in a checkout they lie one level up."""
    package = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    parts = ("op_builder", "compatibility", "csrc")
    for root in (package, os.path.dirname(package)):
        if all(os.path.isdir(os.path.join(root, part)) for part in parts):
            if root not in package_path:
                package_path.append(root)
            return root
    raise ImportError(
        f"apex_te: op_builder, compatibility and csrc are neither in {package} nor beside it;"
        " the installation is incomplete"
    )


class FormerNames:
    """Import finder of renamed modules."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Returns an import spec for the former name of a module; None for all other names."""
        if not fullname.startswith(self.prefix):
            return None
        from . import former_modules  # here, as few programs need it

        return former_modules.find(fullname)


def find_former_names() -> None:
    """Installs ``FormerNames`` in ``sys.meta_path``, once, behind all other finders."""
    if not any(isinstance(finder, FormerNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, FormerNames("apex_te.quantizer"))
        sys.meta_path.append(FormerNames("apex_te."))


def check_torch() -> None:
    """Imports torch and checks that its tensors can be exchanged through DLPack's C interface."""
    torch: Any = importlib.import_module("torch")
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        raise ImportError(
            "apex_te needs torch.Tensor.__dlpack_c_exchange_api__, which torch 2.10 and later "
            f"have, got torch {torch.__version__}"
        )
