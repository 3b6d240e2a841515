"""Parts of an exchange between ranks: one travels while experts compute another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..ops.binding import once_differentiable
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


class Places:
    """Slices of one matrix, in which parts of rows arrive, so that joining them copies nothing."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes
        self._free: dict[int, torch.Tensor] = {}

    def of(self, part: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns the function from rows to the memory for part ``part`` of rows like these."""

        def place(like: torch.Tensor) -> torch.Tensor:
            if part not in self._free:
                whole = like.new_empty((sum(self._sizes), *like.shape[1:]))
                self._free = dict(enumerate(whole.split(self._sizes)))
            return self._free.pop(part)

        return place


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the rows of all parts, without a copy if they lie one after the other."""
    first = parts[0]
    storage, end = first.untyped_storage(), first.storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == storage.data_ptr() and part.is_contiguous()
        if not same or part.storage_offset() != end:
            return torch.cat(tuple(parts))
        end += part.numel()
    shape = (sum(len(part) for part in parts), *first.shape[1:])
    # Not a view, which autograd would tie to its base.
    return first.new_empty(0).set_(storage, first.storage_offset(), shape, first.stride())


class JoinedRows(torch.autograd.Function):
    """Differentiable ``joined``."""

    @staticmethod
    def forward(ctx: Any, *parts: torch.Tensor) -> torch.Tensor:
        ctx.sizes = [len(part) for part in parts]
        return joined(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return grad.contiguous().split(ctx.sizes)


class DividedRows(torch.autograd.Function):
    """Returns consecutive parts of rows, whose gradients are ``joined``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, ...]:
        return x.split(sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        return joined(grads), None


def join_rows(parts: list[torch.Tensor]) -> torch.Tensor:
    """Returns the rows of all parts; differentiable."""
    rows: torch.Tensor = JoinedRows.apply(*parts) if len(parts) > 1 else parts[0]
    return rows


def order_by_part(row_id_map: torch.Tensor, counts: torch.Tensor, sizes: list[int]) -> None:
    """Changes a map so that rows are ordered by part of a rank's experts, then rank and expert.

    ``row_id_map`` is ordered by rank and expert; ``counts`` ``[ranks, local experts]`` are rows of
    each expert, and ``sizes`` the experts in each part.
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
