"""FP8 data and scales that are given, such as those of a file, in the form in which they are held.

``Layout.scales_of_file`` is the shape of a weight's scales in files; scales that are held have more
columns where GEMMs read four at a time.
"""

from __future__ import annotations

from typing import Any

import torch

from ...recipe import Recipe
from ..scheme.base import layout_of
from ..scheme.stack import stored_scale_inv
from ..tensor import QuantizedTensor
from .decode import quantizers_of


def held_codes(recipe: Recipe, codes: Any, scale_inv: Any) -> QuantizedTensor:
    """Returns given data, not copied if contiguous, and a copy of their scales as they are held."""
    _check_codes(recipe, codes)
    *count, rows, cols = codes.shape
    shape = layout_of(recipe).scales_of_file(rows, cols)
    if shape is None:
        raise NotImplementedError(
            "FP8Parameter: recipe must have weights of which both copies have the same data, as "
            f"BlockScaling and CurrentScaling do, got {type(recipe).__name__}"
        )
    if not isinstance(scale_inv, torch.Tensor) or scale_inv.dtype is not torch.float32:
        got = scale_inv.dtype if isinstance(scale_inv, torch.Tensor) else type(scale_inv).__name__
        raise TypeError(f"FP8Parameter: scale_inv must be a float32 tensor, got {got}")
    wanted = torch.Size((*count, *shape))
    if scale_inv.shape != wanted and not (shape == (1,) and scale_inv.shape == wanted[:-1]):
        raise ValueError(
            f"FP8Parameter: scale_inv must have shape {list(wanted)} for codes "
            f"{list(codes.shape)}, got {list(scale_inv.shape)}"
        )
    held = stored_scale_inv(recipe, codes.shape, codes.device).fill_(1.0)
    of_file(held, shape).copy_(scale_inv.detach().view(wanted))
    made = QuantizedTensor(codes.detach().contiguous(), held, None, None, codes.dtype)
    made.free = True
    return made


def of_file(scale_inv: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns a view of the held scales, of a weight or a stack, that files have."""
    index: Any = (..., *[slice(size) for size in shape])
    return scale_inv[index]


def joined_codes(parts: Any) -> QuantizedTensor | None:
    """Joins the rows of weights with scales for each block; None if they are not free or whole."""
    first = parts[0]
    if first._rowwise.dim() != 2 or not first._layout.block_rows:
        return None
    for part in parts:
        same = part._recipe == first._recipe and part.dtype is first.dtype
        if not (same and part._is_whole and part._held.free and part.dim() == 2):
            return None
    held = first._layout.joined([part._held for part in parts])
    if held is not None:
        held.free = True
    return held


def checked_tensors(recipe: Recipe, tensors: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns pickled data and scales, after checking that the scales are those of such data."""
    if len(tensors) != 2 or not all(isinstance(each, torch.Tensor) for each in tensors):
        raise ValueError(f"FP8Parameter: tensors must be two tensors, got {len(tensors)} values")
    rowwise, scale_inv = tensors
    if rowwise.dim() not in (2, 3) or rowwise.element_size() != 1:
        raise ValueError(
            "FP8Parameter: data must be a matrix of bytes, or a stack of them, "
            f"got {list(rowwise.shape)} of {rowwise.dtype}"
        )
    if scale_inv.dtype is torch.uint8:
        scale_inv = scale_inv.view(torch.float8_e8m0fnu)
    due = stored_scale_inv(recipe, rowwise.shape, torch.device("meta"))
    if scale_inv.shape != due.shape or scale_inv.dtype != due.dtype:
        raise ValueError(
            f"FP8Parameter: scale_inv must have shape {list(due.shape)} of {due.dtype} for data "
            f"{list(rowwise.shape)}, got {list(scale_inv.shape)} of {scale_inv.dtype}"
        )
    return rowwise, scale_inv


def _check_codes(recipe: Recipe, codes: Any) -> None:
    """Raises TypeError or ValueError unless ``codes`` are data of a weight or a stack of them."""
    if not isinstance(codes, torch.Tensor):
        raise TypeError(f"FP8Parameter: codes must be a tensor, got {type(codes).__name__}")
    due = quantizers_of(recipe, codes.device).weight.dtype
    if codes.dtype is not due:
        raise TypeError(
            f"FP8Parameter: codes must be {due} with {type(recipe).__name__}, got {codes.dtype}"
        )
    if codes.dim() not in (2, 3):
        raise ValueError(
            "FP8Parameter: codes must be [rows, cols] or [count, rows, cols], "
            f"got {list(codes.shape)}"
        )
