"""Places of scales in a checkpoint, for FP8 weights that ranks split and save with their scales."""

from __future__ import annotations

from typing import Any

import torch

from ...module._core.fp8_entries import SCALE
from .split_model import Entry, state_name
from .split_tensor import Parts

_BLOCK = 128


def weight_of(name: str) -> str:
    """Returns the name of the weight whose scales are called ``name``; any other name as it is."""
    return name.removesuffix(SCALE)


def use_raw_scale_names(model: torch.nn.Module, values: dict[str, Any]) -> None:
    """Renames scales, in place, to the model's own names, as ``use_raw_names`` does FP8 states."""
    if not any(key.endswith(SCALE) for key in values):
        return
    for raw, _ in model.named_parameters(remove_duplicate=False):
        saved = state_name(model, raw)
        if saved != raw and saved + SCALE in values:
            values[raw + SCALE] = values.pop(saved + SCALE)


def parts_of_scales(owner: str, name: str, entry: Entry, scale_inv: Any) -> Parts | None:
    """Returns the place of a rank's scales, or of its part of all; None if it has all of them."""
    parts = entry.parts
    if parts is None or len(entry.shape) > 2:  # a stack: each rank has some of its weights
        return parts
    if scale_inv.dim() < 2:
        return None
    own = sum(length for _, length, _ in parts.pieces)
    rows = (own, parts.size) if parts.dim == 0 else (entry.shape[0],)
    if scale_inv.shape[1] == 1 and scale_inv.shape[0] in rows:  # a scale for each row
        if parts.dim == 0:
            return parts
        raise NotImplementedError(
            f"{owner}: FP8 weights with free scales for each row must be split by rows, got {name} "
            f"split in dimension {parts.dim}"
        )
    found = parts.in_blocks(_BLOCK)
    if found is None:
        raise NotImplementedError(
            f"{owner}: FP8 weights with free scales must be split in whole blocks of {_BLOCK}, got "
            f"{name} of {parts.size} in dimension {parts.dim} in pieces of "
            f"{[length for _, length, _ in parts.pieces]}"
        )
    return found


def check_scales(owner: str, name: str, entry: Entry, scale_inv: Any) -> None:
    """Raises NotImplementedError for one scale of a part, which is not that of the whole weight."""
    if entry.parts is not None and scale_inv.dim() < 2:
        raise NotImplementedError(
            f"{owner}: FP8 weights that ranks split must have scales of blocks to be saved with "
            f"their scales, got one scale for this rank's part of {weight_of(name)}"
        )
