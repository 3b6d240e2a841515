"""Collectives on matrices of rows, each started at once and waited for where its result is read.

Backends that only know plain types see FP8 data as bytes. Row ``i`` of rank ``r`` is row
``r * rows + i`` of a gathered matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import distributed

__all__ = [
    "ALL_GATHER",
    "REDUCE_SCATTER",
    "Pending",
    "all_gather_rows",
    "all_reduce",
    "all_to_all_rows",
    "max_over_ranks",
    "reduce_scatter_rows",
    "world_size",
]

# torch 2.13 has new names for these.
ALL_GATHER = "all_gather_single"
REDUCE_SCATTER = "reduce_scatter_single"
if not hasattr(distributed, ALL_GATHER):
    ALL_GATHER, REDUCE_SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"
_traced: Any = torch.ops._c10d_functional


def world_size(group: Any) -> int:
    """Returns the number of ranks of ``group``; 1 if torch.distributed is not initialised."""
    if not distributed.is_available() or not distributed.is_initialized():
        return 1
    return distributed.get_world_size(group)


class Pending:
    """A result that a collective is still writing."""

    __slots__ = ("_keep", "_result", "_work")

    def __init__(self, result: torch.Tensor, work: Any = None, keep: torch.Tensor | None = None):
        self._result = result
        self._work = work
        self._keep = keep  # what the collective reads

    def wait(self) -> torch.Tensor:
        """Returns the result; on a GPU the current stream waits, not the host."""
        if self._work is not None:
            self._work.wait()
            self._work = self._keep = None
        return self._result

    def pieces(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yields the result's rows as they arrive: their slice of the result, and the rows."""
        result = self.wait()
        yield slice(0, result.shape[0]), result

    def borrow(self) -> torch.Tensor:
        """Returns the result, to be read until ``release``; ``wait`` returns one to keep."""
        return self.wait()

    def release(self) -> None:
        """Ends the reading that ``pieces`` or ``borrow`` began."""


class _Traced(Pending):
    """The result of a collective in a graph of ``torch.compile``, its bytes read as ``dtype``."""

    __slots__ = ("_dtype",)

    def __init__(self, result: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        super().__init__(result)
        self._dtype = dtype

    def wait(self) -> torch.Tensor:
        result = _traced.wait_tensor(self._result)
        return result if self._dtype is None else result.view(self._dtype)


def _name(group: Any) -> str:
    """Returns the name by which ops in a graph know a group."""
    named: Any = distributed.group.WORLD if group is None else group
    return named.group_name


def all_gather_rows(x: torch.Tensor, group: Any) -> Pending:
    """Gathers the rows of all ranks ``[ranks * rows, ..]``; ``x`` is ``[rows, ..]`` on each."""
    x = x.contiguous()
    if torch.compiler.is_compiling():
        ranks, name = world_size(group), _name(group)
        return _Traced(_traced.all_gather_into_tensor(_plain(x), ranks, name), x.dtype)
    out = x.new_empty((x.shape[0] * world_size(group), *x.shape[1:]))
    gather = getattr(distributed, ALL_GATHER)
    return Pending(out, gather(_plain(out), _plain(x), group=group, async_op=True), x)


def reduce_scatter_rows(x: torch.Tensor, group: Any, out: torch.Tensor | None = None) -> Pending:
    """Sums ``x`` ``[rows, ..]`` over ranks; the result is this rank's ``[rows / ranks, ..]``.

    Args:
        x: this rank's summand.
        group: process group; None is the whole world.
        out: contiguous tensor for the result. Not used in a graph of ``torch.compile``, where
            torch 2.11 loses the gradient of a copy.

    Raises:
        ValueError: rows that the ranks do not divide.
    """
    ranks = world_size(group)
    if x.shape[0] % ranks:
        raise ValueError(
            f"reduce_scatter_rows: x must have a multiple of {ranks} rows to be split over ranks, "
            f"got {x.shape[0]}"
        )
    x = x.contiguous()
    if torch.compiler.is_compiling():
        return _Traced(_traced.reduce_scatter_tensor(x, "sum", ranks, _name(group)))
    if out is None:
        out = x.new_empty((x.shape[0] // ranks, *x.shape[1:]))
    scatter = getattr(distributed, REDUCE_SCATTER)
    return Pending(out, scatter(out, x, group=group, async_op=True), x)


def all_to_all_rows(
    x: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: Any
) -> Pending:
    """Exchanges rows between ranks; the result is ``[sum(received), ..]``, ordered by sender.

    Args:
        x: ``[sum(sent), ..]``, this rank's rows, ordered by receiver.
        sent: number of rows for each rank, possibly 0.
        received: number of rows from each rank.
        group: process group; None is the whole world.
    """
    x = x.contiguous()
    if torch.compiler.is_compiling():
        sizes = (list(received), list(sent))
        return _Traced(_traced.all_to_all_single(_plain(x), *sizes, _name(group)), x.dtype)
    out = x.new_empty((sum(received), *x.shape[1:]))
    work = distributed.all_to_all_single(
        _plain(out), _plain(x), list(received), list(sent), group=group, async_op=True
    )
    return Pending(out, work, x)


def all_reduce(x: torch.Tensor, group: Any) -> Pending:
    """Sums ``x`` over ranks, in place; in a graph of ``torch.compile`` into a new tensor."""
    if torch.compiler.is_compiling():
        return _Traced(_traced.all_reduce(x, "sum", _name(group)))
    return Pending(x, distributed.all_reduce(x, group=group, async_op=True))


def max_over_ranks(amax: torch.Tensor, group: Any) -> torch.Tensor:
    """Takes the largest ``amax`` (fp32, not negative) over ranks, element by element, in place.

    The bits travel as an int32, which orders as the numbers do, Inf above every number and NaN
    above Inf: a NaN on one rank reaches all.
    """
    bits = amax.view(torch.int32)
    if torch.compiler.is_compiling():
        bits.copy_(_Traced(_traced.all_reduce(bits, "max", _name(group))).wait())
        return amax
    distributed.all_reduce(bits, op=distributed.ReduceOp.MAX, group=group)
    return amax


def _plain(x: torch.Tensor) -> torch.Tensor:
    """Returns FP8 data as bytes, other tensors unchanged."""
    return x.view(torch.uint8) if x.element_size() == 1 else x
