"""Rotary position embedding: rotates pairs of a head's elements by angles of their position."""

from __future__ import annotations

from typing import Any

import torch

from .binding import OpFunction, bind, checked

LAYOUTS = ("sbhd", "bshd", "thd")

fwd_into = bind("rope", "rope_fwd")
bwd_into = bind("rope", "rope_bwd")


@checked
def rope(
    x: torch.Tensor,
    freqs: torch.Tensor | None = None,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    layout: str = "sbhd",
    interleaved: bool = False,
    rotary_dim: int | None = None,
    start: int = 0,
    starts: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    inplace: bool = False,
) -> torch.Tensor:
    """Rotates each pair (a, b) by its angle t to (a cos t - b sin t, b cos t + a sin t).

    The angle is ``freqs[position, pair]``, where position is the token's position in its sequence.

    Pairs are elements (i, i + rotary_dim / 2) of a head, or (2i, 2i + 1) if ``interleaved``;
    elements from rotary_dim on are copied. Arithmetic is float32, rounded once; angles of any size
    are reduced exactly. It is differentiable in x, but not in the angles. With ``starts`` or
    ``cu_seqlens`` a position outside the table gives NaN. With "thd" a token that is in no sequence
    is rotated by the angle 0.

    Args:
        x: float32, float16 or bfloat16 of shape [s, b, h, d] (sbhd), [b, s, h, d] (bshd) or
            [t, h, d] (thd). Only the last dimension must be dense, so that views of a fused QKV
            tensor need no copy.
        freqs: angles in radians, float32, float16 or bfloat16 [max_seq, c] or [max_seq, 1, 1, c].
            If c is rotary_dim / 2, it has one column for each pair. If c is rotary_dim, it has one
            for each element; both elements of a pair must have equal angles, and the first is read.
        cos, sin: cosines and sines of the angles, in the shape of ``freqs``; give both instead of
            ``freqs``.
        layout: order of the dimensions of x: "sbhd", "bshd" or "thd".
        interleaved: pair neighbours, (2i, 2i + 1), instead of (i, i + rotary_dim / 2).
        rotary_dim: number of elements of a head that are rotated, even, at most d and 8192; None
            stands for c.
        start: position of each sequence's first token.
        starts: int32 or int64 [batch], added to ``start`` for each sequence.
        cu_seqlens: int32 [batch + 1], ascending, for "thd": sequence i is tokens cu_seqlens[i] to
            cu_seqlens[i + 1] - 1; positions restart in each sequence.
        inplace: overwrite x.

    Returns:
        A contiguous tensor of x's shape and dtype, or x with ``inplace``.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: ``layout`` is unknown; a shape does not match it; ``rotary_dim`` is odd, above d
            or neither c nor 2 c; both or neither of ``freqs`` and the pair ``cos``, ``sin`` given;
            ``cu_seqlens`` is missing for "thd", or given for another layout; ``start`` is below 0;
            ``starts`` and ``cu_seqlens`` are None and the table has fewer positions than x; or
            ``inplace`` is True and the last dimension of x is not dense.
        NotImplementedError: ``rotary_dim`` is above 8192, or the angles require a gradient.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"rope: layout must be 'sbhd', 'bshd' or 'thd', got {layout!r}")
    freqs, cos, sin = angle_table("freqs", freqs), angle_table("cos", cos), angle_table("sin", sin)
    if rotary_dim is None:
        table = freqs if freqs is not None else cos
        rotary_dim = table.shape[-1] if table is not None else 0
    if x.dim() and x.shape[-1] > 1 and x.stride(-1) != 1:
        if inplace:
            raise ValueError(
                "rope: x must be dense in its last dimension to be overwritten, "
                f"got strides {list(x.stride())}"
            )
        x = x.contiguous()
    options = (rotary_dim, start, LAYOUTS.index(layout), interleaved)
    return _Rope.apply(x, freqs, cos, sin, starts, cu_seqlens, options, False, inplace)


def angle_table(name: str, table: torch.Tensor | None) -> torch.Tensor | None:
    """Returns a table [max_seq, c] or [max_seq, 1, 1, c] as the kernels read it; None for None.

    That is contiguous [max_seq, c], float32 for 16-bit elements. Raises NotImplementedError, of the
    argument ``name``, if it requires a gradient.
    """
    if table is None:
        return None
    if table.requires_grad:
        raise NotImplementedError(f"rope: {name} must not require a gradient: none is computed")
    if table.dtype in (torch.float16, torch.bfloat16):
        table = table.float()
    if table.dim() > 2 and all(extent == 1 for extent in table.shape[1:-1]):
        table = table.reshape(table.shape[0], table.shape[-1])
    return table.contiguous()


class _Rope(OpFunction):
    LABEL = "rope"

    @staticmethod
    def forward(ctx, x, freqs, cos, sin, starts, cu_seqlens, options, is_backward, inplace):
        ctx.save_for_backward(freqs, cos, sin, starts, cu_seqlens)
        ctx.options, ctx.is_backward = options, is_backward
        out = x if inplace else x.new_empty(x.shape)
        call = bwd_into if is_backward else fwd_into
        call(x, freqs, cos, sin, starts, cu_seqlens, out, *options)
        if inplace:
            ctx.mark_dirty(x)
        return out

    @staticmethod
    def backward(ctx, grad):
        if grad.shape[-1] > 1 and grad.stride(-1) != 1:
            grad = grad.contiguous()
        saved = ctx.saved_tensors
        dx = _Rope.apply(grad, *saved, ctx.options, not ctx.is_backward, False)
        return dx, None, None, None, None, None, None, None, None


def reference(
    x: torch.Tensor,
    freqs: torch.Tensor | None = None,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    layout: str = "sbhd",
    interleaved: bool = False,
    rotary_dim: int | None = None,
    start: int = 0,
    starts: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes ``rope`` in plain PyTorch in x's dtype, also float64, as its specification.

    The arguments are those of ``rope``: x is [s, b, h, d], [b, s, h, d] or [t, h, d] by ``layout``,
    and ``freqs``, or ``cos`` and ``sin``, are [max_seq, c] or [max_seq, 1, 1, c].
    """
    table: Any = freqs if freqs is not None else cos
    dim = table.shape[-1] if rotary_dim is None else rotary_dim
    position = torch.arange(x.shape[0 if layout != "bshd" else 1], device=x.device)
    if cu_seqlens is not None:
        begins = cu_seqlens.long()
        sequence = torch.searchsorted(begins, position, right=True) - 1
        is_outside = (sequence < 0) | (sequence >= len(begins) - 1)
        sequence = sequence.clamp(0, max(len(begins) - 2, 0))
        position = position - begins[sequence] + start
        if starts is not None and len(starts):
            position = position + starts.long()[sequence]
    else:
        is_outside = torch.zeros_like(position, dtype=torch.bool)
        added = torch.zeros(1, dtype=torch.int64, device=x.device) if starts is None else starts
        position, added = position + start, added.long()
        if layout == "sbhd":
            position, is_outside = position[:, None] + added, is_outside[:, None]
        else:
            position = position + added[:, None]

    def columns(table: torch.Tensor) -> torch.Tensor:
        """Returns the table's values by position and pair, in float64; NaN outside the table."""
        table = table.reshape(table.shape[0], -1).double()
        if table.shape[1] == dim:
            table = table[:, ::2] if interleaved else table[:, : dim // 2]
        rows = table[position.clamp(0, max(len(table) - 1, 0))]
        is_missing = (position < 0) | (position >= len(table))
        return rows.masked_fill(is_missing[..., None], float("nan"))[..., None, :]

    is_zero = is_outside[..., None, None]
    cosines = columns(freqs).cos() if freqs is not None else columns(cos)  # type: ignore[arg-type]
    sines = columns(freqs).sin() if freqs is not None else columns(sin)  # type: ignore[arg-type]
    cosines, sines = cosines.masked_fill(is_zero, 1).to(x), sines.masked_fill(is_zero, 0).to(x)
    rotated, rest = x[..., :dim], x[..., dim:]
    if interleaved:
        a, b = rotated[..., ::2], rotated[..., 1::2]
    else:
        a, b = rotated.split(dim // 2, -1) if dim else (rotated, rotated)
    a, b = a * cosines - b * sines, b * cosines + a * sines
    rotated = torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)
    return torch.cat((rotated, rest), -1)
