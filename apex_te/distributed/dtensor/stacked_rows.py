"""Exchange of rows between ranks, for parameters that hold several matrices one after the other.

A rank computes with its share of the rows of each matrix. These are several pieces of the
parameter, but a DTensor's placement can describe one only (torch's strided placement is private,
saves the wrong rows through ``torch.distributed.checkpoint`` and is gathered in the wrong order
after ``fully_shard``). So a rank stores one piece of the parameter, ``Shard(0)``. Forward gets the
rows that the rank computes with from the ranks that store them; backward sends the gradient's rows
back to these ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...comm.collectives import all_to_all_rows
from ...ops.binding import once_differentiable


class Exchange(NamedTuple):
    """Plan of one rank for the all-to-all of a parameter's rows in forward.

    Attributes:
        pieces: ``(first, rows)`` of each piece to send: its first stored row and number of rows,
            ordered by receiving rank; None if the stored rows are already in that order.
        sent: number of rows to each rank.
        received: number of rows from each rank; they arrive in the parameter's order.
    """

    pieces: tuple[tuple[int, int], ...] | None
    sent: tuple[int, ...]
    received: tuple[int, ...]


def shares_of(matrices: tuple[int, ...], rank: int, ranks: int) -> list[tuple[int, int]]:
    """Returns ``(first, rows)`` of the rows of each matrix that ``rank`` computes with."""
    found, top = [], 0
    for rows in matrices:
        own = rows // ranks
        found.append((top + rank * own, own))
        top += rows
    return found


def exchange_of(matrices: tuple[int, ...], rank: int, ranks: int) -> Exchange:
    """Returns the plan of ``rank`` for the rows of a parameter that holds several matrices."""
    kept = sum(matrices) // ranks

    def pieces(source: int, receiver: int) -> list[tuple[int, int]]:
        """Returns row ranges, without ``last``, that ``source`` stores and ``receiver`` needs."""
        found = []
        for top, own in shares_of(matrices, receiver, ranks):
            first, last = max(top, source * kept), min(top + own, (source + 1) * kept)
            if first < last:
                found.append((first, last))
        return found

    def count(found: list[tuple[int, int]]) -> int:
        return sum(last - first for first, last in found)

    by_receiver = [pieces(rank, other) for other in range(ranks)]
    ordered = [piece for found in by_receiver for piece in found]
    return Exchange(
        None
        if ordered == sorted(ordered)
        else tuple((first - rank * kept, last - first) for first, last in ordered),
        tuple(count(found) for found in by_receiver),
        tuple(count(pieces(other, rank)) for other in range(ranks)),
    )


def rows_of_matrices(local: torch.Tensor, exchange: Exchange, group: Any) -> torch.Tensor:
    """Returns the rows of each matrix that this rank computes with.

    Forward and backward are collective. ``local`` is this rank's piece ``[rows / ranks, ..]`` of
    the parameter. The result has the same shape: this rank's share of the first matrix, then of the
    second, and so on.
    """
    rows: torch.Tensor = _RowsOfMatrices.apply(local, exchange, group)
    return rows


class _RowsOfMatrices(torch.autograd.Function):
    """Differentiable all-to-all behind ``rows_of_matrices``."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, exchange: Exchange, group: Any) -> torch.Tensor:
        ctx.exchange, ctx.group = exchange, group
        if exchange.pieces is not None:
            local = torch.cat([local.narrow(0, *piece) for piece in exchange.pieces])
        return all_to_all_rows(local, exchange.sent, exchange.received, group).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        pieces, sent, received = ctx.exchange
        back = all_to_all_rows(grad, received, sent, ctx.group).wait()
        if pieces is None:
            return back, None, None
        local = torch.empty_like(back)
        found = back.split([rows for _, rows in pieces])
        for (first, rows), piece in zip(pieces, found, strict=True):
            local.narrow(0, first, rows).copy_(piece)
        return local, None, None
