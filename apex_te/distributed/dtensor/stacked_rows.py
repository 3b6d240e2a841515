"""Rows of parameters that hold several matrices one after the other, exchanged between ranks.

A rank computes with its rows of each matrix. These are several pieces of the parameter, but the
placement of a DTensor can name one only (torch's strided placement is private, saves the wrong rows
through ``torch.distributed.checkpoint`` and is gathered in the wrong order after ``fully_shard``).
So a rank keeps one piece, ``Shard(0)``, and forward exchanges rows; backward sends the gradient's
rows back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ...comm.collectives import all_to_all_rows

__all__ = ["Exchange", "exchange_of", "rows_of_matrices", "shares_of"]


class Exchange(NamedTuple):
    """The rows that one rank sends, of those it keeps, and receives.

    Attributes:
        pieces: first row and number of rows of each piece, ordered by receiver; None if the rows
            lie in that order.
        sent: number of rows to each rank.
        received: number of rows from each rank, in the order of the parameter.
    """

    pieces: tuple[tuple[int, int], ...] | None
    sent: tuple[int, ...]
    received: tuple[int, ...]


def shares_of(matrices: tuple[int, ...], rank: int, ranks: int) -> list[tuple[int, int]]:
    """Returns the first row and the number of rows of ``rank``'s share of each matrix.

    Args:
        matrices: rows of each matrix, multiples of ``ranks``, one after the other.
        rank: rank whose share is asked for.
        ranks: number of ranks.
    """
    found, top = [], 0
    for rows in matrices:
        own = rows // ranks
        found.append((top + rank * own, own))
        top += rows
    return found


def exchange_of(matrices: tuple[int, ...], rank: int, ranks: int) -> Exchange:
    """Returns the exchange of a parameter; ``matrices`` are as in ``shares_of``."""
    kept = sum(matrices) // ranks

    def pieces(source: int, receiver: int) -> list[tuple[int, int]]:
        """Returns rows [first, last) that ``source`` keeps and ``receiver`` computes with."""
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
    """Returns this rank's rows of every matrix; collective, and so is backward.

    Args:
        local: ``[rows / ranks, ..]``, this rank's piece of the parameter.
        exchange: from ``exchange_of``.
        group: the ranks that have the pieces.
    """
    rows: torch.Tensor = _RowsOfMatrices.apply(local, exchange, group)
    return rows


class _RowsOfMatrices(torch.autograd.Function):
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
