"""Flax's boxes around parameters, which carry logical axes, for code that does without Flax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def is_box(value: Any) -> bool:
    """Returns True if a node of a tree is a box such as ``nn.LogicallyPartitioned``."""
    return hasattr(value, "replace_boxed") and hasattr(value, "value")


def unbox(tree: Any) -> Any:
    """Returns a tree in which every box is replaced by its array."""
    return jax.tree.map(lambda x: unbox(x.value) if is_box(x) else x, tree, is_leaf=is_box)


def rebox(box: Any, change: Callable[[Any], Any], names: Callable[[tuple[Any, ...]], Any]) -> Any:
    """Returns a copy of a box with ``change`` of its array and ``names`` of its axes' names.

    An array without a box gives an array.
    """
    if not is_box(box):
        return change(box)
    made = box.replace_boxed(change(box.value))
    return made.replace(names=names(tuple(box.names))) if hasattr(box, "names") else made
