"""Place of the folders that belong to the package: beside its modules, or a checkout's root."""

from __future__ import annotations

import os
from collections.abc import MutableSequence


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
