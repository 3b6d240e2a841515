"""Casts a fused QKV projection's weight, and the gradient of its output, to FP8.

The rows of such a weight are heads. Interleaved they go group by group: the query heads of the
group, its key head and its value head; else all queries, all keys and all values. A GEMM with
the weight's rows in the latter order has queries, keys and values that are views of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import cast_transpose as _cast_transpose
from .binding import bind, checked, note_written
from .fp8_output import FP8Output, check_fp8_dtype, columnwise_length

_weight = bind("qkv_cast", "qkv_cast_weight")
_grad = bind("qkv_cast", "qkv_cast_grad")

# Rows that one line of the bias-gradient workspace sums (csrc/common/numerics/column_sums.h).
_TILE_ROWS = 256


class QkvGradOutput(NamedTuple):
    """FP8 data of a projection's output gradient.

    Attributes:
        output: FP8 copies of the gradient, a matrix [tokens, features].
        dbias: [features] in the gradient's dtype, its column sums; None if not requested.
    """

    output: FP8Output
    dbias: torch.Tensor | None


@checked
def qkv_cast_weight(
    weight: torch.Tensor,
    scale: torch.Tensor,
    fp8_dtype: torch.dtype,
    *,
    repeats: int,
    groups: int,
    columnwise: bool = False,
    amax: torch.Tensor | None = None,
    scale_inv: torch.Tensor | None = None,
    noop: torch.Tensor | None = None,
    out_rowwise: torch.Tensor | None = None,
    out_columnwise: torch.Tensor | None = None,
) -> FP8Output:
    """Casts an interleaved QKV weight to FP8 and sorts the rowwise copy into queries, keys, values.

    Each element becomes saturating_cast(float(weight) * scale), as in ``cast_transpose``.

    Args:
        weight: [groups * (repeats + 2) * size, cols] float32, float16 or bfloat16; size is the
            number of rows of a head. Heads are ordered by group: query heads, key head, value
            head. Made contiguous if it is not.
        scale: one float32 element on the weight's device.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2; on a CPU or an AMD GPU also their
            fnuz forms.
        repeats: number of query heads in a group.
        groups: number of groups, each with one key head and one value head.
        columnwise: also make the transpose, [cols, rows], whose columns keep the weight's order.
        amax: one float32 element, becomes max(amax, max |weight|), before scaling; NaN counts as
            largest. None computes no amax.
        scale_inv: one float32 element to receive 1 / scale; a new one unless given.
        noop: one int32 element on the device; if it is not 0, no output is written.
        out_rowwise: contiguous [rows, cols] in ``fp8_dtype``, to write instead of a new tensor.
        out_columnwise: contiguous [cols, rows] in ``fp8_dtype``, to write instead of a new tensor.

    Returns:
        The copies. Rows of the rowwise copy are all query heads, all key heads, all value heads.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match.
    """
    check_fp8_dtype("qkv_cast_weight", fp8_dtype, fnuz=True)
    if weight.dim() != 2:
        raise ValueError(
            f"qkv_cast_weight: weight must have 2 dimensions, got shape {list(weight.shape)}"
        )
    weight = weight.contiguous()
    given = [t for t in (out_rowwise, out_columnwise, scale_inv, amax) if t is not None]
    if out_rowwise is None:
        out_rowwise = torch.empty_like(weight, dtype=fp8_dtype)
    if columnwise and out_columnwise is None:
        out_columnwise = weight.new_empty(weight.shape[::-1], dtype=fp8_dtype)
    if scale_inv is None:
        scale_inv = torch.empty_like(scale)
    _weight(weight, scale, out_rowwise, out_columnwise, amax, scale_inv, noop, repeats, groups)
    note_written(*given)
    return FP8Output(out_rowwise, out_columnwise, scale_inv)


@checked
def qkv_cast_grad(
    queries: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: torch.Tensor,
    fp8_dtype: torch.dtype,
    *,
    interleaved: bool,
    rowwise: bool = True,
    columnwise: bool = True,
    amax: torch.Tensor | None = None,
    with_dbias: bool = False,
    pad_columnwise: bool = False,
) -> QkvGradOutput:
    """Casts the gradient of a QKV projection's output to FP8, from the gradients of its heads.

    The copies equal those that ``cast_transpose`` makes of the joined matrix [tokens, features].

    Args:
        queries: [..., repeats * groups, size] float32, float16 or bfloat16, with one or two leading
            dimensions of tokens; None for a projection to keys and values.
        keys: [..., groups, size]. Queries, keys and values have one dtype. They may have any
            strides; a tensor whose last dimension is not dense is copied.
        values: [..., groups, size].
        scale: one float32 element on their device.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2; on a CPU or an AMD GPU also their fnuz
            forms.
        interleaved: order the features by group (query heads, key head, value head). If False, the
            order is all queries, all keys, all values.
        rowwise: make the rowwise copy, [tokens, features].
        columnwise: make the columnwise copy, the transpose [features, tokens].
        amax: one float32 element, becomes max(amax, max |gradient|), before scaling; NaN counts as
            largest. None computes no amax.
        with_dbias: also return the column sums (deterministic).
        pad_columnwise: pad the columnwise copy to [features, tokens rounded up to 16]; the added
            columns are zeros.

    Returns:
        FP8 copies of the gradient, a matrix [tokens, features], and the column sums or None.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match.
    """
    check_fp8_dtype("qkv_cast_grad", fp8_dtype, fnuz=True)
    keys, values = _heads("keys", keys), _heads("values", values)
    heads = keys.shape[2] * 2
    if queries is not None:
        queries = _heads("queries", queries)
        heads += queries.shape[2]
    rows, cols = keys.shape[0] * keys.shape[1], heads * keys.shape[3]
    row = keys.new_empty((rows, cols), dtype=fp8_dtype) if rowwise else None
    col = None
    if columnwise:
        length = columnwise_length(rows, pad_columnwise)
        col = keys.new_empty((cols, length), dtype=fp8_dtype)
    scale_inv = torch.empty_like(scale)
    dbias = partial_sums = None
    if with_dbias:
        dbias = keys.new_empty(cols)
        partial_sums = keys.new_empty((-(-rows // _TILE_ROWS), cols), dtype=torch.float32)
    _grad(queries, keys, values, scale, row, col, amax, scale_inv, dbias, partial_sums, interleaved)
    if amax is not None:
        note_written(amax)
    return QkvGradOutput(FP8Output(row, col, scale_inv), dbias)


def _heads(name: str, x: torch.Tensor) -> torch.Tensor:
    """Returns [..., heads, size] as [outer, inner, heads, size], dense in the last dimension."""
    if x.dim() not in (3, 4):
        raise ValueError(
            f"qkv_cast_grad: {name} must have 3 or 4 dimensions, got shape {list(x.shape)}"
        )
    if x.stride(-1) != 1:
        x = x.contiguous()
    return x if x.dim() == 4 else x.unsqueeze(1)


def reference_weight(
    weight: torch.Tensor,
    scale: torch.Tensor,
    fp8_dtype: torch.dtype,
    *,
    repeats: int,
    groups: int,
    amax: torch.Tensor | None = None,
) -> FP8Output:
    """Computes ``qkv_cast_weight`` in plain PyTorch, as its specification; makes both copies."""
    out = _cast_transpose.reference(weight, scale, fp8_dtype, amax=amax)
    assert out.rowwise is not None
    heads = out.rowwise.view(torch.uint8).view(groups, repeats + 2, -1, weight.shape[1])
    parts = (heads[:, :repeats], heads[:, repeats], heads[:, repeats + 1])
    rowwise = torch.cat([part.reshape(-1, weight.shape[1]) for part in parts])
    return FP8Output(rowwise.view(fp8_dtype), out.columnwise, out.scale_inv)


def reference_grad(
    queries: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: torch.Tensor,
    fp8_dtype: torch.dtype,
    *,
    interleaved: bool,
    amax: torch.Tensor | None = None,
) -> QkvGradOutput:
    """Computes ``qkv_cast_grad`` in plain PyTorch, as its specification.

    Arguments are as in ``qkv_cast_grad``. Both copies and ``dbias`` are always returned.
    """
    parts = [keys, values] if queries is None else [queries, keys, values]
    if interleaved:
        parts = [part.unflatten(-2, (keys.shape[-2], -1)) for part in parts]
    joined = torch.cat(parts, -2)
    tokens = keys.shape[:-2]
    joined = joined.reshape(tokens.numel(), joined.shape[len(tokens) :].numel())
    out = _cast_transpose.reference(joined, scale, fp8_dtype, amax=amax)
    return QkvGradOutput(FP8Output(out.rowwise, out.columnwise, out.scale_inv), out.dbias)
