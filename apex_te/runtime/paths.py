"""Import paths of the package: folders beside it or in a checkout, and modules' former names."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableSequence
from typing import Any


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
    """Installs ``FormerNames`` in ``sys.meta_path``, once, behind all other finders.

    Before them for a package that is gone: its leftover folder would pass as a namespace package.
    """
    if not any(isinstance(finder, FormerNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, FormerNames("apex_te.quantizer"))
        sys.meta_path.append(FormerNames("apex_te."))
