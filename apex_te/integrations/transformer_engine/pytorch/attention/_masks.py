"""Mask types and windows as Transformer Engine takes them, in the form that apex_te takes."""

from __future__ import annotations

import functools
import warnings
from typing import Any

from ..._names import neutral

__all__ = ["check_diagonal", "checked_window", "mask_type_of", "reads_masks"]


def mask_type_of(name: Any) -> Any:
    """Returns the name of a mask type, for which ``"padding,causal"`` is ``"padding_causal"``.

    Args:
        name: the argument ``attn_mask_type``; any other value is returned unchanged.
    """
    if not isinstance(name, str) or "," not in name:
        return name
    name = name.replace(",", "_")
    return "padding_causal" if name == "causal_padding" else name


def reads_masks(name: Any) -> bool:
    """Returns True if a mask type reads ``attention_mask``; others ignore it."""
    return isinstance(name, str) and ("padding" in name or name == "arbitrary")


def checked_window(name: Any, size: Any) -> Any:
    """Returns a window whose right end is the one that a mask type has.

    Args:
        name: the mask type.
        size: the argument ``window_size``. With causal types (left, 0) is returned; with others,
            where (-1, 0) is no window of their own but a causal one, None for that.
    """
    if size is None or not isinstance(name, str) or len(size) != 2:
        return size
    left, right = size
    if "causal" in name:
        if right != 0 and left >= 0:
            _say_window_is_changed(name, (left, right), (left, 0))
        return (left, 0)
    if (left, right) == (-1, 0):
        _say_window_is_changed(name, (left, right), (-1, -1))
        return None
    return size


@functools.cache
def _say_window_is_changed(name: str, size: tuple[int, int], now: tuple[int, int]) -> None:
    """Warns, once for each pair of values, that a window does not go with its mask type."""
    warnings.warn(
        f"apex_te: window_size {size} is taken for {now}, as attn_mask_type is {name!r}",
        stacklevel=5,
    )


def check_diagonal(owner: str, value: bool | None, name: Any, size: Any, bias_type: str) -> None:
    """Checks that windows and ALiBi are aligned as the mask type has them in apex_te.

    Args:
        owner: name of the class, for the error.
        value: the argument ``bottom_right_diagonal``: None, or of no effect with causal types, or
            without a window and ALiBi.
        name: the mask type.
        size: the window (left, right) or None.
        bias_type: the argument ``core_attention_bias_type``.

    Raises:
        NotImplementedError: positions are to count from the first tokens, but do from the last.
    """
    if value is None or value is True or (isinstance(name, str) and "causal" in name):
        return
    if (size is not None and tuple(size) != (-1, -1)) or bias_type == "alibi":
        neutral(owner, bottom_right_diagonal=(value, (None, True)))
