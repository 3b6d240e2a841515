"""Collectives on the rows of tensors, started at once and waited for where the result is read.

Most functions return a ``Pending``, whose ``wait`` gives the result; in a graph of
``torch.compile`` they use torch's functional collectives. Tensors of one byte per element, such as
FP8 data, travel as uint8, because backends do not know FP8 dtypes. Row ``i`` of rank ``r`` is row
``r * rows + i`` of a gathered tensor, where each rank has ``rows`` rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import distributed

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
    """Handle of a tensor that a collective is still writing.

    ``wait`` returns a tensor that the caller may keep. ``pieces`` and ``borrow`` avoid a copy of a
    shared buffer; call ``release`` after them. ``keep`` is the tensor that the collective reads; it
    is kept alive until ``wait``.
    """

    __slots__ = ("_keep", "_result", "_work")

    def __init__(self, result: torch.Tensor, work: Any = None, keep: torch.Tensor | None = None):
        self._result = result
        self._work = work
        self._keep = keep  # what the collective reads

    def wait(self) -> torch.Tensor:
        """Returns the result, for the caller to keep; on a GPU the stream waits, not the host."""
        if self._work is not None:
            self._work.wait()
            self._work = self._keep = None
        return self._result

    def unfinished(self) -> torch.Tensor:
        """Returns the tensor that the collective writes; do not read it before ``wait``."""
        return self._result

    def pieces(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yields ``(slice, rows)`` of the result as they arrive; valid until ``release``."""
        result = self.wait()
        yield slice(0, result.shape[0]), result

    def borrow(self) -> torch.Tensor:
        """Returns the result without a copy; it is valid until the caller calls ``release``."""
        return self.wait()

    def release(self) -> None:
        """Ends the use of tensors from ``pieces`` or ``borrow``; their memory may then be reused.

        Work on these tensors that is already on the current stream still reads the right values.
        """


class _Traced(Pending):
    """Handle of a functional collective's result in a graph, viewed in ``dtype`` if not None."""

    __slots__ = ("_dtype",)

    def __init__(self, result: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        super().__init__(result)
        self._dtype = dtype

    def wait(self) -> torch.Tensor:
        result = _traced.wait_tensor(self._result)
        return result if self._dtype is None else result.view(self._dtype)


def _name(group: Any) -> str:
    """Returns the name of ``group`` (None is the world) that functional collectives take."""
    named: Any = distributed.group.WORLD if group is None else group
    return named.group_name


def all_gather_rows(x: torch.Tensor, group: Any) -> Pending:
    """Begins to gather ``x``, with equal shapes on all ranks, to ``[ranks * rows, ..]`` by rank."""
    x = x.contiguous()
    if torch.compiler.is_compiling():
        ranks, name = world_size(group), _name(group)
        return _Traced(_traced.all_gather_into_tensor(_plain(x), ranks, name), x.dtype)
    out = x.new_empty((x.shape[0] * world_size(group), *x.shape[1:]))
    gather = getattr(distributed, ALL_GATHER)
    return Pending(out, gather(_plain(out), _plain(x), group=group, async_op=True), x)


def reduce_scatter_rows(x: torch.Tensor, group: Any, out: torch.Tensor | None = None) -> Pending:
    """Begins to sum ``x`` over ranks; rank ``r`` gets the rows from ``r * rows / ranks`` on.

    If ``out``, contiguous ``[rows / ranks, ..]``, is given, it is the result. A graph of
    ``torch.compile`` ignores it, because torch 2.11 loses the gradient of a copy there.
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
    x: torch.Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    group: Any,
    out: torch.Tensor | None = None,
) -> Pending:
    """Begins to send ``sent[r]`` rows to each rank ``r``, and to receive ``received[r]`` rows.

    The rows of ``x`` are ordered by receiving rank, those of the result by sending rank. ``out``,
    contiguous, is the result if it is given; a graph of ``torch.compile`` ignores it.
    """
    x = x.contiguous()
    if torch.compiler.is_compiling():
        sizes = (list(received), list(sent))
        return _Traced(_traced.all_to_all_single(_plain(x), *sizes, _name(group)), x.dtype)
    if out is None:
        out = x.new_empty((sum(received), *x.shape[1:]))
    work = distributed.all_to_all_single(
        _plain(out), _plain(x), list(received), list(sent), group=group, async_op=True
    )
    return Pending(out, work, x)


def all_reduce(x: torch.Tensor, group: Any) -> Pending:
    """Begins to sum ``x`` over ranks, in place except in a graph of ``torch.compile``."""
    if torch.compiler.is_compiling():
        return _Traced(_traced.all_reduce(x, "sum", _name(group)))
    return Pending(x, distributed.all_reduce(x, group=group, async_op=True))


def max_over_ranks(amax: torch.Tensor, group: Any) -> torch.Tensor:
    """Reduces ``amax`` (fp32, no element negative) by maximum over ranks, in place.

    The bits are reduced as int32: for non-negative floats the order is the same, with NaN above
    Inf. So a NaN on one rank reaches all ranks.
    """
    bits = amax.view(torch.int32)
    if torch.compiler.is_compiling():
        bits.copy_(_Traced(_traced.all_reduce(bits, "max", _name(group))).wait())
        return amax
    distributed.all_reduce(bits, op=distributed.ReduceOp.MAX, group=group)
    return amax


def _plain(x: torch.Tensor) -> torch.Tensor:
    """Returns a uint8 view of a tensor of one byte per element, other tensors unchanged."""
    return x.view(torch.uint8) if x.element_size() == 1 else x
