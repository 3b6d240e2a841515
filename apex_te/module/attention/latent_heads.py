"""Heads of latent attention: rotary parts rotated, one key part shared by all heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...comm.collectives import all_gather_rows, all_reduce, reduce_scatter_rows
from ...ops.binding import OpFunction, once_differentiable
from ...ops.rope import LAYOUTS, bwd_into, fwd_into, rope


class Turn(NamedTuple):
    """Rotation of all elements of a head's rotary part.

    Float32 tables [max_seq, c] have angles, or cosines and sines; c is the part's size or half of
    it. The other fields are those of ``Rotation``.
    """

    freqs: torch.Tensor | None
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    interleaved: bool
    start: int = 0
    starts: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None

    def into(self, op: Callable[..., None], x: torch.Tensor, out: torch.Tensor, form: str) -> None:
        """Writes the rotation of ``x`` [..., heads, p] by ``fwd_into`` or ``bwd_into``."""
        op(
            x, self.freqs, self.cos, self.sin, self.starts, self.cu_seqlens, out, x.shape[-1],
            self.start, LAYOUTS.index(form), self.interleaved,
        )  # fmt: skip

    def of(self, x: torch.Tensor, form: str) -> torch.Tensor:
        """Returns the rotation of ``x`` [..., heads, p], differentiable."""
        return rope(
            x, self.freqs, cos=self.cos, sin=self.sin, layout=form, interleaved=self.interleaved,
            rotary_dim=x.shape[-1], start=self.start, starts=self.starts,
            cu_seqlens=self.cu_seqlens,
        )  # fmt: skip


def latent_heads(
    q: torch.Tensor, kv: torch.Tensor, pe: torch.Tensor, form: str, turn: Turn | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns queries, keys and values of latent attention, with their rotary parts rotated.

    Args:
        q: queries [..., h, n + p]; the last p elements are rotated.
        kv: keys and values [..., h, n + v] without rotary parts.
        pe: rotary part [..., p] of the keys of all heads, not yet rotated.
        form: layout, as ``rope`` names it.
        turn: None does not rotate.
    """
    if torch.compiler.is_compiling():  # the compiler fuses these by itself
        n = q.shape[-1] - pe.shape[-1]
        part = pe.unsqueeze(-2)
        q = rotated_queries(q, n, form, turn)
        part = part if turn is None else turn.of(part, form)
        part = part.expand(*kv.shape[:-1], -1)
        return q, torch.cat((kv[..., :n], part), -1), kv[..., n:]
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    found = _LatentHeads.apply(q, kv, pe, form, turn)
    return found


def rotated_queries(q: torch.Tensor, n: int, form: str, turn: Turn | None) -> torch.Tensor:
    """Returns ``q`` [..., h, n + p] with its last p elements rotated."""
    return q if turn is None else torch.cat((q[..., :n], turn.of(q[..., n:], form)), -1)


class _LatentHeads(OpFunction):
    """Autograd function of ``latent_heads`` that writes each result and gradient once."""

    LABEL = "MultiLatentAttention"

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, kv: torch.Tensor, pe: torch.Tensor, form: str, turn: Turn | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        n = q.shape[-1] - pe.shape[-1]
        ctx.n, ctx.form, ctx.turn, ctx.size = n, form, turn, kv.shape[-1]
        queries = _turned(fwd_into, q, n, form, turn)
        part = pe.unsqueeze(-2)
        if turn is not None:
            part = _rotated(fwd_into, part, form, turn)
        keys = kv.new_empty((*kv.shape[:-1], q.shape[-1]))
        keys[..., :n].copy_(kv[..., :n])
        keys[..., n:].copy_(part.expand(*kv.shape[:-1], -1))
        # A copy, since a view would keep the keys in kv, too.
        return queries, keys, kv[..., n:].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> tuple[Any, ...]:
        n, form, turn = ctx.n, ctx.form, ctx.turn
        dkv = dk.new_empty((*dk.shape[:-1], ctx.size))
        dkv[..., :n].copy_(dk[..., :n])
        dkv[..., n:].copy_(dv)
        part = dk[..., n:].sum(-2, keepdim=True)
        if turn is not None:
            part = _rotated(bwd_into, part, form, turn)
        return _turned(bwd_into, dq, n, form, turn), dkv, part.squeeze(-2), None, None


def _turned(
    op: Callable[..., None], x: torch.Tensor, n: int, form: str, turn: Turn | None
) -> torch.Tensor:
    """Returns ``x`` [..., h, n + p] with its last p elements rotated."""
    if turn is None:
        return x.view_as(x)
    out = x.new_empty(x.shape)
    out[..., :n].copy_(x[..., :n])
    last = x[..., n:]
    turn.into(op, last if last.stride(-1) == 1 else last.contiguous(), out[..., n:], form)
    return out


def _rotated(op: Callable[..., None], x: torch.Tensor, form: str, turn: Turn) -> torch.Tensor:
    """Returns the rotation of all elements of ``x`` [..., heads, p]."""
    out = x.new_empty(x.shape)
    turn.into(op, x.contiguous(), out, form)
    return out


def shared_rows(x: torch.Tensor, group: Any, split: bool) -> torch.Tensor:
    """Returns rows of a replicated layer's output that each rank uses for its own heads.

    With ``split``, ranks have parts of the rows, which are gathered. Gradients are summed.
    """
    rows: torch.Tensor = _SharedRows.apply(x, group, split)
    return rows


class _SharedRows(OpFunction):
    """Autograd function of ``shared_rows``."""

    LABEL = "MultiLatentAttention"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, split: bool) -> torch.Tensor:
        ctx.group, ctx.split = group, split
        return all_gather_rows(x, group).wait() if split else x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.split:
            return reduce_scatter_rows(grad, ctx.group).wait(), None, None
        # A clone: the collective writes in place.
        return all_reduce(grad.clone(), ctx.group).wait(), None, None
