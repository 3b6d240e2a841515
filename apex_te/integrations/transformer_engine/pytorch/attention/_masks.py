"""Mask types and windows as Transformer Engine takes them, in the form that apex_te takes."""

from __future__ import annotations

import functools
import warnings
from typing import Any

from ..._names import neutral


def mask_type_of(name: Any) -> Any:
    """Returns the name of a mask type, for which ``"padding,causal"`` is ``"padding_causal"``."""
    if not isinstance(name, str) or "," not in name:
        return name
    name = name.replace(",", "_")
    return "padding_causal" if name == "causal_padding" else name


def reads_masks(name: Any) -> bool:
    """Returns True if a mask type reads ``attention_mask``; others ignore it."""
    return isinstance(name, str) and ("padding" in name or name == "arbitrary")


def checked_window(name: Any, size: Any) -> Any:
    """Returns a window whose right end is the one that a mask type has."""
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


def prepare_masks(values: dict[str, Any]) -> None:
    """Changes a constructor's ``attn_mask_type`` and ``window_size`` to those of apex_te."""
    kind = values["attn_mask_type"] = mask_type_of(values["attn_mask_type"])
    values["window_size"] = checked_window(kind, values["window_size"])


@functools.cache
def _say_window_is_changed(name: str, size: tuple[int, int], now: tuple[int, int]) -> None:
    """Warns, once for each pair of values, that a window does not go with its mask type."""
    warnings.warn(
        f"apex_te: window_size {size} is taken for {now}, as attn_mask_type is {name!r}",
        stacklevel=5,
    )


def check_diagonal(owner: str, value: bool | None, name: Any, size: Any, bias_type: str) -> None:
    """Checks that windows and ALiBi are aligned as the mask type has them in apex_te.

    ``value`` is ``bottom_right_diagonal``: without effect if it is None, with causal types, and
    without a window and ALiBi. NotImplementedError if positions would count from the last tokens.
    """
    if value is None or value is True or (isinstance(name, str) and "causal" in name):
        return
    if (size is not None and tuple(size) != (-1, -1)) or bias_type == "alibi":
        neutral(owner, bottom_right_diagonal=(value, (None, True)))
