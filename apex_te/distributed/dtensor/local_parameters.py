"""Modules whose parameters are DTensors, but whose forward computes on their local tensors.

If a parameter holds several matrices one after the other, a rank computes with its share of the
rows of each. These are several pieces of the parameter, but a DTensor's placement can describe one
only (torch's strided placement is private, saves the wrong rows through
``torch.distributed.checkpoint`` and is gathered in the wrong order after ``fully_shard``). So a
rank stores one piece, ``Shard(0)``. Forward gets the rows that the rank computes with from the
ranks that store them; backward sends the gradient's rows back to these ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ...comm.collectives import all_reduce, all_to_all_rows
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


def local_parameters(
    module: torch.nn.Module, summed: Iterable[str], stacked: Mapping[str, Exchange] | None = None
) -> None:
    """Makes ``module`` compute on the local tensors of its DTensor parameters.

    The module's class becomes a subclass whose forward uses the local tensors as parameters while
    it runs. Modules with plain parameters pay no host time. ``summed`` names replicated parameters
    whose gradient must be summed over the mesh, because each rank computes it from its own rows or
    heads. ``stacked`` maps names of parameters that hold several matrices to the exchange of their
    rows.
    """
    kind: Any = type(module)
    module.__class__ = _local_class(kind)
    own = {name for name, parameter in module._parameters.items() if parameter is not None}
    module._summed_gradients = own.intersection(summed)  # type: ignore[assignment]
    module._stacked = {k: v for k, v in (stacked or {}).items() if k in own}  # type: ignore


@functools.cache
def _local_class(kind: Any) -> type:
    """Returns a subclass of the module class ``kind``, of its name, to compute on local tensors."""
    # The modules that have both call the second from the first.
    entry = "forward_with_residual" if hasattr(kind, "forward_with_residual") else "forward"
    inner: Callable[..., Any] = getattr(kind, entry)

    @functools.wraps(inner)
    def on_local_tensors(self: Any, inp: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(inp, DTensor):
            raise TypeError(
                f"{kind.__name__}: inp must be this rank's part as a plain tensor, got a DTensor "
                f"with {inp.placements}"
            )
        kept = self.__dict__
        parameters = kept["_parameters"]
        kept["_parameters"] = _locals(kind, parameters, kept["_summed_gradients"], kept["_stacked"])
        kept["_dtensors"] = parameters
        try:
            return inner(self, inp, *args, **kwargs)
        finally:
            kept["_parameters"] = kept.pop("_dtensors")

    def weight_sources(self: Any, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # An in-place op on a DTensor counts up its own version, not its local tensor's.
        own = [p for p in self._dtensors.values() if isinstance(p, DTensor)]
        if self._stacked:  # rows that were exchanged are new ones in every forward
            return (*(p.to_local() for p in own), *own)
        return (*kind._weight_sources(self, weight), *own)

    names: dict[str, Any] = {entry: on_local_tensors, "__module__": kind.__module__}
    if hasattr(kind, "_weight_sources"):
        names["_weight_sources"] = weight_sources
    return type(kind.__name__, (kind,), names)


def _locals(
    kind: type, parameters: dict[str, Any], summed: set[str], stacked: dict[str, Exchange]
) -> dict[str, torch.Tensor | None]:
    """Returns the tensors that forward reads instead of the parameters, by name."""
    found: dict[str, torch.Tensor | None] = {}
    for name, parameter in parameters.items():
        if not isinstance(parameter, DTensor):
            found[name] = parameter
            continue
        if parameter.device_mesh.ndim != 1:
            raise RuntimeError(
                f"{kind.__name__}: {name} must be gathered over the data-parallel ranks before "
                "forward: call the module that fully_shard was applied to, or apply it to this one"
            )
        local = parameter.to_local()
        if name in summed and local.requires_grad:
            local = _SumGradient.apply(local, parameter.device_mesh.get_group())
        elif name in stacked:
            local = rows_of_matrices(local, stacked[name], parameter.device_mesh.get_group())
        found[name] = local
    return found


class _SumGradient(torch.autograd.Function):
    """Identity in forward; backward sums the gradient over the ranks of ``group``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        # Others may hold the tensor that comes in.
        total = grad.clone(memory_format=torch.contiguous_format)
        return all_reduce(total, ctx.group).wait(), None
