"""Splitting of a fused projection's output into heads, which may be rotated on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...ops.op_function import OpFunction, once_differentiable
from ...ops.rope import _LAYOUTS, _bwd, _fwd, _table, rope

__all__ = ["HeadLayout", "Rotation", "rotation_of", "split_heads"]


class HeadLayout(NamedTuple):
    """Layout of the heads in the last dimension of a fused projection's output.

    Attributes:
        qkv_format: layout of the other dimensions, ``"sbhd"``, ``"bshd"`` or ``"thd"``.
        repeats: query heads of each group; 0 for a projection to keys and values only.
        groups: the number of groups, each with one key head and one value head.
        size: elements of a head.
        interleaved: heads lie group by group; else all queries, all keys, all values.
    """

    qkv_format: str
    repeats: int
    groups: int
    size: int
    interleaved: bool

    def parts(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns views of the queries, keys and values in a projection's output.

        Args:
            x: [..., features].

        Returns:
            ``(queries, keys, values)``, without queries if ``repeats`` is 0, each [..., heads,
            size]; queries of several heads in interleaved groups are [..., groups, repeats, size].
        """
        lead, groups, repeats = x.shape[:-1], self.groups, self.repeats
        if not self.interleaved:
            counts = [repeats * groups, groups, groups] if repeats else [groups, groups]
            return x.view(*lead, (repeats + 2) * groups, self.size).split(counts, -2)
        heads = x.view(*lead, groups, repeats + 2, self.size)
        if repeats < 2:
            return heads.unbind(-2)
        keys, values = heads.select(-2, repeats), heads.select(-2, repeats + 1)
        return heads.narrow(-2, 0, repeats), keys, values


class Rotation(NamedTuple):
    """Rotary embedding of queries and keys.

    Attributes:
        queries, keys: angles float32 [max_seq, c], of the first c elements of a head.
        interleaved: the elements of a rotated pair are neighbours, not c / 2 apart.
        start: position of the first token.
        cu_seqlens: for thd, the starts of sequences, int32 [n + 1]; else None.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    interleaved: bool
    start: int
    cu_seqlens: torch.Tensor | None

    def options(self, layout: str) -> dict[str, Any]:
        """Returns the keyword arguments of ``rope``, except the angles, for a qkv_format."""
        return {
            "layout": layout,
            "interleaved": self.interleaved,
            "start": self.start,
            "cu_seqlens": self.cu_seqlens,
        }


def rotation_of(
    owner: str,
    rotary_pos_emb: Any,
    interleaved: bool,
    start: int,
    cu_seqlens: torch.Tensor | None,
) -> Rotation | None:
    """Returns the rotation that ``rotary_pos_emb`` means.

    Args:
        owner: the name of the module in errors.
        rotary_pos_emb: a tensor of angles [max_seq, 1, 1, c], two (of queries, of keys), or None.
        interleaved, start, cu_seqlens: as in ``Rotation``.

    Returns:
        The rotation, whose angles ``rope`` checks later; None without angles.

    Raises:
        TypeError: neither a tensor nor two.
    """
    if rotary_pos_emb is None:
        return None
    both = rotary_pos_emb if isinstance(rotary_pos_emb, (tuple, list)) else (rotary_pos_emb,) * 2
    if len(both) != 2 or not all(isinstance(each, torch.Tensor) for each in both):
        raise TypeError(
            f"{owner}: rotary_pos_emb must be a tensor of angles or two (queries, keys), "
            f"got {type(rotary_pos_emb).__name__}"
        )
    queries: Any = _table("freqs", both[0])
    keys: Any = queries if both[1] is both[0] else _table("freqs", both[1])
    return Rotation(queries, keys, interleaved, start, cu_seqlens)


def split_heads(
    x: torch.Tensor, layout: HeadLayout, rotation: Rotation | None = None
) -> tuple[torch.Tensor, ...]:
    """Splits a projection's output into heads, and rotates queries and keys.

    Args:
        x: the output [..., features].
        layout: its layout.
        rotation: the rotation, or None.

    Returns:
        ``(queries, keys, values)``, without queries if ``layout.repeats`` is 0, each [..., heads,
        size]. Without a rotation they are views, but for queries of several heads in interleaved
        groups. With one they are new tensors, the values too: nothing then keeps ``x`` alive.
    """
    if torch.compiler.is_compiling():  # the compiler joins the gradients by itself
        *parts, values = (_flat(part, x.dim()) for part in layout.parts(x))
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
        parts = layout.parts(x)
        ctx.layout, ctx.rotation, ctx.shape = layout, rotation, x.shape
        if rotation is not None:
            out = tuple(x.new_empty(part.shape) for part in parts)
            _rotate(_fwd, parts, out, layout, rotation)
            parts = out
        return tuple(_flat(part, len(ctx.shape)) for part in parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        layout, rotation = ctx.layout, ctx.rotation
        heads = list(grads)
        if layout.interleaved and layout.repeats > 1:
            heads[0] = heads[0].unflatten(-2, (layout.groups, layout.repeats))
        if rotation is not None:
            dx = grads[0].new_empty(ctx.shape)
            _rotate(_bwd, heads, layout.parts(dx), layout, rotation)
        elif layout.interleaved and layout.repeats < 2:
            dx = torch.stack(grads, -2).reshape(ctx.shape)
        else:
            # In one dimension of heads per group where they are interleaved.
            dx = torch.cat([h if h.dim() == heads[0].dim() else h.unsqueeze(-2) for h in heads], -2)
            dx = dx.reshape(ctx.shape)
        return dx, None, None


def _flat(part: torch.Tensor, dims: int) -> torch.Tensor:
    """Returns [..., heads, size] of one part of an output that has ``dims`` dimensions."""
    return part if part.dim() == dims + 1 else part.flatten(-3, -2)


def _rotate(
    op: Any,
    parts: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor],
    layout: HeadLayout,
    rotation: Rotation,
) -> None:
    """Rotates queries and keys into ``out`` and copies the values.

    Args:
        op: the forward or the backward of ``rope``.
        parts: what ``HeadLayout.parts`` returned.
        out: memory of the same shapes.
        layout: the layout of the heads.
        rotation: the rotation.
    """
    angles = (rotation.queries, rotation.keys)[3 - len(parts) :]
    for x, y, freqs in zip(parts[:-1], out[:-1], angles, strict=True):
        if x.stride(-1) != 1:
            x = x.contiguous()
        for a, b, form in _slices(x, y, layout.qkv_format):
            op(
                a, freqs, None, None, None, rotation.cu_seqlens, b, freqs.shape[-1],
                rotation.start, _LAYOUTS.index(form), rotation.interleaved,
            )  # fmt: skip
    _copy(out[-1], parts[-1])


def _copy(to: torch.Tensor, x: torch.Tensor) -> None:
    """Copies ``x`` into ``to``, in words of 8 bytes where both allow it.

    A GPU copies slowly by 2 bytes.
    """
    per_word = 8 // x.element_size()
    if all(
        t.stride(-1) == 1
        and not any(n % per_word for n in (t.storage_offset(), t.shape[-1], *t.stride()[:-1]))
        for t in (to, x)
    ):
        to, x = to.view(torch.int64), x.view(torch.int64)
    to.copy_(x)


def _slices(
    x: torch.Tensor, y: torch.Tensor, qkv_format: str
) -> Sequence[tuple[torch.Tensor, torch.Tensor, str]]:
    """Returns views of ``x`` and ``y`` with one dimension of heads, not two, as ``rope`` needs.

    Returns:
        ``(x, y, layout)`` of each view.
    """
    if x.dim() == len(qkv_format):
        return ((x, y, qkv_format),)
    if qkv_format == "sbhd":  # groups as a part of the batch
        return ((x.flatten(1, 2), y.flatten(1, 2), "sbhd"),)
    if qkv_format == "bshd":  # each sequence as [s, groups, heads, size]
        return [(a, b, "sbhd") for a, b in zip(x.unbind(0), y.unbind(0), strict=True)]
    return [(a, b, "thd") for a, b in zip(x.unbind(1), y.unbind(1), strict=True)]
