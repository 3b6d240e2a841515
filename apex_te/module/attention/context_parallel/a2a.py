"""Attention with heads split over ranks: each rank has whole sequences of some heads meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....ops.binding import OpFunction
from .ranks import ContextRanks
from .split import Order


def to_heads(
    ranks: ContextRanks, order: Order, layout: str, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Exchanges this rank's tokens of all heads for all tokens of its part of the heads.

    Args:
        layout: ``qkv_format`` of the tensors; sizes of heads and dtypes are those of attention.

    Returns:
        A tensor [s, b, h / ranks, d] or [t, h / ranks, d] for each, tokens in order.
    """
    return _Exchange.apply(ranks, order, layout, False, *tensors)


def to_tokens(
    ranks: ContextRanks, order: Order, layout: str, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Exchanges back what ``to_heads`` has exchanged, to tensors in ``layout``."""
    return _Exchange.apply(ranks, order, layout, True, *tensors)


class _Exchange(OpFunction):
    """Both directions of the exchange; each is the other's gradient."""

    LABEL = "DotProductAttention"

    @staticmethod
    def forward(
        ctx: Any, ranks: ContextRanks, order: Order, layout: str, back: bool, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.given = ranks, order, layout, not back
        return _exchanged(ranks, order, layout, back, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, None, None, None, *_Exchange.apply(*ctx.given, *grads)


def _exchanged(
    ranks: ContextRanks, order: Order, layout: str, back: bool, tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    swap = layout == "bshd"
    if back:
        heads = [x.shape[-2:] for x in tensors]
        packed = torch.cat([x.flatten(-2) for x in tensors], -1)  # [s, b, columns]
        packed = ranks.exchange(order.by_rank(packed)).unflatten(0, (ranks.size, -1))
        columns = packed.split([n * d for n, d in heads], -1)
        found = []
        for x, (n, d) in zip(columns, heads, strict=True):
            x = x.unflatten(-1, (n, d)).movedim(0, -3)  # [s, b, ranks, n, d]
            found.append((x.transpose(0, 1) if swap else x).flatten(-3, -2))
        return tuple(found)
    parts = []
    for x in tensors:
        x = x.transpose(0, 1) if swap else x
        parts.append(x.unflatten(-2, (ranks.size, -1)))  # [s, b, ranks, n, d]
    packed = torch.cat([x.movedim(-3, 0).flatten(-2) for x in parts], -1)
    packed = order.whole(ranks.exchange(packed.flatten(0, 1)))
    columns = packed.split([x.shape[-2] * x.shape[-1] for x in parts], -1)
    return tuple(c.unflatten(-1, x.shape[-2:]) for c, x in zip(columns, parts, strict=True))


def own_heads(
    ranks: ContextRanks, x: torch.Tensor | None, dim: int, heads: int
) -> torch.Tensor | None:
    """Returns this rank's part of ``x`` if that has all heads in dimension ``dim``, else ``x``."""
    if x is None or x.shape[dim] != heads:
        return x
    part = heads // ranks.size
    return x.narrow(dim, ranks.rank * part, part)
