"""Splitting of a fused projection's output into heads, which may be rotated on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...ops._head_order import in_words
from ...ops.binding import OpFunction, once_differentiable
from ...ops.rope import LAYOUTS, angle_table, bwd_into, fwd_into, rope
from .._core.heads import HeadLayout, flat_heads


class Rotation(NamedTuple):
    """Rotary embedding of queries and keys: float32 angles [max_seq, c] for c elements of a head.

    With ``interleaved``, the elements of a rotated pair are neighbours, not c / 2 apart.
    ``starts``, int32 [n], are the positions of the sequences' first tokens, which are added to
    ``start``.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    interleaved: bool
    start: int
    cu_seqlens: torch.Tensor | None
    starts: torch.Tensor | None = None

    def options(self, layout: str) -> dict[str, Any]:
        """Returns the keyword arguments of ``rope``, except the angles, for a qkv_format."""
        return {
            "layout": layout,
            "interleaved": self.interleaved,
            "start": self.start,
            "cu_seqlens": self.cu_seqlens,
            "starts": self.starts,
        }


def rotation_of(
    owner: str,
    rotary_pos_emb: Any,
    interleaved: bool,
    start: int,
    cu_seqlens: torch.Tensor | None,
) -> Rotation | None:
    """Returns the rotation by angles [max_seq, 1, 1, c] or a tuple of two; None without angles."""
    if rotary_pos_emb is None:
        return None
    both = rotary_pos_emb if isinstance(rotary_pos_emb, (tuple, list)) else (rotary_pos_emb,) * 2
    if len(both) != 2 or not all(isinstance(each, torch.Tensor) for each in both):
        raise TypeError(
            f"{owner}: rotary_pos_emb must be a tensor of angles or two (queries, keys), "
            f"got {type(rotary_pos_emb).__name__}"
        )
    queries: Any = angle_table("freqs", both[0])
    keys: Any = queries if both[1] is both[0] else angle_table("freqs", both[1])
    return Rotation(queries, keys, interleaved, start, cu_seqlens)


def split_heads(
    x: torch.Tensor, layout: HeadLayout, rotation: Rotation | None = None
) -> tuple[torch.Tensor, ...]:
    """Splits a projection's output into heads, and rotates queries and keys.

    Without a rotation they are views, except for queries of several heads in interleaved groups.
    With a rotation all three are new tensors, so that they do not keep ``x`` alive.
    """
    if torch.compiler.is_compiling():  # the compiler joins the gradients by itself
        *parts, values = layout.heads(x)
        if rotation is None:
            return (*parts, values)
        options = rotation.options(layout.qkv_format)
        angles = (rotation.queries, rotation.keys)[2 - len(parts) :]
        rotated = [rope(p, a, **options) for p, a in zip(parts, angles, strict=True)]
        return (*rotated, values)
    return _SplitHeads.apply(x, layout, rotation)


class _SplitHeads(OpFunction):
    """Autograd function of ``split_heads`` that writes the gradient of ``x`` once."""

    LABEL = "MultiheadAttention"

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, layout: HeadLayout, rotation: Rotation | None
    ) -> tuple[torch.Tensor, ...]:
        ctx.layout, ctx.rotation, ctx.shape = layout, rotation, x.shape
        if rotation is None:
            return layout.heads(x)
        parts = layout.parts(x)
        out = tuple(x.new_empty(part.shape) for part in parts)
        _rotate(fwd_into, parts, out, layout, rotation)
        return tuple(flat_heads(part, x.dim()) for part in out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        layout, rotation = ctx.layout, ctx.rotation
        if rotation is None:
            return layout.joined(grads, ctx.shape), None, None
        dx = grads[0].new_empty(ctx.shape)
        _rotate(bwd_into, layout.by_group(grads), layout.parts(dx), layout, rotation)
        return dx, None, None


def _rotate(
    op: Any,
    parts: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor],
    layout: HeadLayout,
    rotation: Rotation,
) -> None:
    """Rotates queries and keys into ``out`` and copies the values."""
    angles = (rotation.queries, rotation.keys)[3 - len(parts) :]
    for x, y, freqs in zip(parts[:-1], out[:-1], angles, strict=True):
        if x.stride(-1) != 1:
            x = x.contiguous()
        for a, b, form, starts in _slices(x, y, layout.qkv_format, rotation.starts):
            op(
                a, freqs, None, None, starts, rotation.cu_seqlens, b, freqs.shape[-1],
                rotation.start, LAYOUTS.index(form), rotation.interleaved,
            )  # fmt: skip
    to, x = in_words((out[-1], parts[-1]))
    to.copy_(x)


def _slices(
    x: torch.Tensor, y: torch.Tensor, qkv_format: str, starts: torch.Tensor | None
) -> Sequence[tuple[torch.Tensor, torch.Tensor, str, torch.Tensor | None]]:
    """Splits ``x`` and ``y`` into views with one dimension of heads, not two, for ``rope``."""
    if x.dim() == len(qkv_format):
        return ((x, y, qkv_format, starts),)
    groups = x.shape[-3]
    if qkv_format == "sbhd":  # groups as a part of the batch
        each = None if starts is None else starts.repeat_interleave(groups)
        return ((x.flatten(1, 2), y.flatten(1, 2), "sbhd", each),)
    if qkv_format == "thd":
        pairs = zip(x.unbind(1), y.unbind(1), strict=True)
        return [(a, b, "thd", starts) for a, b in pairs]
    # Each sequence as [s, groups, heads, size].
    own = [None] * x.shape[0] if starts is None else starts[:, None].repeat(1, groups).unbind(0)
    triples = zip(x.unbind(0), y.unbind(0), own, strict=True)
    return [(a, b, "sbhd", each) for a, b, each in triples]
