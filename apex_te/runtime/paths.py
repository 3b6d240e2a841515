"""Places of the package's modules: folders beside it or in a checkout's root, and former names."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableSequence
from typing import Any


def extend(package_path: MutableSequence[str]) -> str:
    """Makes op_builder and compatibility importable below the package; returns their folder.

    An installed package holds them; a checkout (also an editable install) has them one level up.

    Raises:
        ImportError: they are in neither place.
    """
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
    """Finder that is asked last: modules by the names that they had in earlier versions."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Returns the spec of a module of the package that was renamed; None for other names."""
        if not fullname.startswith("apex_te."):
            return None
        from . import former_modules  # here, as few programs need it

        return former_modules.find(fullname)


def find_former_names() -> None:
    """Makes imports find modules by their former names."""
    if not any(isinstance(finder, FormerNames) for finder in sys.meta_path):
        sys.meta_path.append(FormerNames())
