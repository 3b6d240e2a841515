"""Flax's boxes around parameters, which carry logical axes, for code that does without Flax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

__all__ = ["is_box", "rebox", "unbox"]


def is_box(value: Any) -> bool:
    """Returns True if a node of a tree is a box such as ``nn.LogicallyPartitioned``."""
    return hasattr(value, "replace_boxed") and hasattr(value, "value")


def unbox(tree: Any) -> Any:
    """Returns a tree with the arrays in place of their boxes, wherever they lie."""
    return jax.tree.map(lambda x: unbox(x.value) if is_box(x) else x, tree, is_leaf=is_box)


def rebox(box: Any, change: Callable[[Any], Any], names: Callable[[tuple[Any, ...]], Any]) -> Any:
    """Returns a box, or an array without one, with another array and other names of its axes.

    Args:
        box: the box or the array.
        change: function of the array.
        names: function of the axes' names.
    """
    if not is_box(box):
        return change(box)
    made = box.replace_boxed(change(box.value))
    return made.replace(names=names(tuple(box.names))) if hasattr(box, "names") else made
