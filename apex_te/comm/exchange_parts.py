"""Parts of an exchange between ranks: one travels while experts compute another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .row_exchange import Arrival

# What ``TokenDispatcher.begin_chunks`` returns; the first gives a ``Dispatch``.
Arriving = Callable[[], Any]
Chunk = Callable[[], Arriving]
Join = Callable[[list[torch.Tensor]], torch.Tensor]


def run_in_chunks(
    dispatcher: Any,
    tokens: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    chunks: int,
    compute: Callable[[int, Any], torch.Tensor],
) -> torch.Tensor:
    """Dispatches by a ``TokenDispatcher``, computes and combines ``chunks`` parts; collective.

    While ``compute(i, dispatch)`` computes the results of part ``i``, part ``i + 1`` is sent, and
    the results of part ``i - 1`` return. Backward takes the same steps in reverse, because autograd
    runs nodes in the reverse order of their making: last part first.
    """
    parts, join = dispatcher.begin_chunks(tokens, probs, routing_map, chunks)
    arriving = parts[0]()
    returning: list[Arrival] = []
    returned = []
    for i in range(chunks):
        arrives = arriving
        if i + 1 < chunks:
            arriving = parts[i + 1]()
        dispatch = arrives()
        returning.append(dispatch.begin_combine(compute(i, dispatch)))
        if i:
            returned.append(returning.pop(0)())
    returned.append(returning.pop()())
    return join(returned)


def sizes_of_parts(count: int, chunks: int) -> list[int]:
    """Returns the sizes of ``chunks`` parts of a whole, which differ by at most one."""
    return [count * (i + 1) // chunks - count * i // chunks for i in range(chunks)]


def split_rows(x: torch.Tensor, sizes: list[int], dim: int = 0) -> tuple[torch.Tensor, ...]:
    """Returns the parts of ``x``; of one part no view, whose gradient would be copied."""
    return x.split(sizes, dim) if len(sizes) > 1 else (x,)


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Returns the rows of all parts."""
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def order_by_part(row_id_map: torch.Tensor, counts: torch.Tensor, sizes: list[int]) -> None:
    """Changes a map so that rows are ordered by part of a rank's experts, then rank and expert.

    Args:
        row_id_map: of ``moe_permute.make_map``, which orders rows by rank and expert.
        counts: ``[ranks, local experts]``, rows of each expert.
        sizes: number of a rank's experts in each part.
    """
    ranks = counts.shape[0]
    ordered = torch.cat([part.flatten() for part in counts.split(sizes, 1)])
    starts = (ordered.cumsum(0) - ordered).split([ranks * size for size in sizes])
    wanted = torch.cat([part.view(ranks, -1) for part in starts], 1).flatten()
    counts = counts.flatten()
    shift = wanted - (counts.cumsum(0) - counts)
    # Of each token pairs of row and expert; behind those in use is anything.
    rows, experts = row_id_map[:-2, 1::2], row_id_map[:-2, 2::2]
    rows += shift[experts.clamp(0, len(shift) - 1).long()]
