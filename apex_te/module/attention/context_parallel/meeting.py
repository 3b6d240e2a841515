"""Exchanges of keys between context-parallel ranks, and of their gradients back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from .ranks import ContextRanks

Span = tuple[int, int]


class Meeting(Protocol):
    """Exchange of rows, after which a rank has those that its queries see.

    Attributes:
        rows: number of rows that it then has.
        own_start: where its own begin among these.
    """

    rows: int
    own_start: int

    def begin(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begins to exchange this rank's rows; the result waits and returns all, [rows, ..]."""

    def give_back(self, grads: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of this rank's rows, summed over ranks, from those of all."""


class Everything:
    """Meeting in which each rank gets the rows of all, by rank."""

    def __init__(self, ranks: ContextRanks, rows: int) -> None:
        self._ranks = ranks
        self.rows, self.own_start = rows * ranks.size, rows * ranks.rank

    def begin(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """See ``Meeting``."""
        return self._ranks.gather(x).wait

    def give_back(self, grads: torch.Tensor) -> torch.Tensor:
        """See ``Meeting``."""
        return self._ranks.sum_parts(grads)


class Neighbourhood:
    """Meeting in which each rank gets the rows that it needs alone, behind its own.

    Args:
        needs: for each rank, spans of the rows of all ranks, by rank, each of one rank's rows.
        rows: number of rows of each rank.
    """

    def __init__(self, ranks: ContextRanks, needs: tuple[tuple[Span, ...], ...], rows: int) -> None:
        self._ranks, self._own = ranks, rows
        own = ranks.rank
        self._sent = [
            [(a - own * rows, b - own * rows) for a, b in _united(spans, own, rows)]
            if rank != own
            else []
            for rank, spans in enumerate(needs)
        ]
        self._received = [
            _united(needs[own], rank, rows) if rank != own else [] for rank in range(len(needs))
        ]
        self.own_start, self.rows = 0, rows + sum(map(_count, self._received))

    def places(self, spans: tuple[Span, ...]) -> tuple[Span, ...]:
        """Returns where this rank has rows that it needs, from where all ranks have them."""
        first = self._ranks.rank * self._own
        held, at = [(first, first + self._own, 0)], self._own
        for a, b in (span for each in self._received for span in each):
            held.append((a, b, at))
            at += b - a
        moved = []
        for a, b in spans:
            start, place = next((c, place) for c, d, place in held if c <= a and b <= d)
            moved.append((a - start + place, b - start + place))
        return tuple(moved)

    def begin(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """See ``Meeting``."""
        sent = torch.cat([x[:0], *(x[a:b] for spans in self._sent for a, b in spans)])
        counts = [_count(spans) for spans in self._sent], [_count(s) for s in self._received]
        pending = self._ranks.send(sent, *counts)
        return lambda: torch.cat((x, pending.wait()))

    def give_back(self, grads: torch.Tensor) -> torch.Tensor:
        """See ``Meeting``; the sum is in float32, in the order of ranks."""
        counts = [_count(spans) for spans in self._received], [_count(s) for s in self._sent]
        back = self._ranks.send(grads[self._own :], *counts).wait()
        found, at = grads[: self._own], 0
        wide = torch.promote_types(grads.dtype, torch.float32)
        # Most rows of a window are no other rank's.
        shared = _united(tuple(span for spans in self._sent for span in spans), 0, self._own)
        sums = [found[a:b].to(wide) for a, b in shared]
        for a, b in (span for spans in self._sent for span in spans):
            place, total = next(
                (a - c, total)
                for (c, d), total in zip(shared, sums, strict=True)
                if c <= a and b <= d
            )
            total[place : place + b - a] += back[at : at + b - a]
            at += b - a
        for (a, b), total in zip(shared, sums, strict=True):
            found[a:b] = total
        return found


def _united(spans: tuple[Span, ...], owner: int, rows: int) -> list[Span]:
    """Returns the spans of an owner's rows, in order, with those that touch as one."""
    found: list[Span] = []
    for a, b in sorted(span for span in spans if span[0] // rows == owner):
        if found and a <= found[-1][1]:
            a, last = found.pop()
            b = max(b, last)
        found.append((a, b))
    return found


def _count(spans: list[Span]) -> int:
    """Returns the number of rows in spans."""
    return sum(b - a for a, b in spans)
