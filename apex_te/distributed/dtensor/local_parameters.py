"""Modules whose parameters are DTensors, but whose forward computes on their local tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ...comm.collectives import all_reduce
from .stacked_rows import Exchange, rows_of_matrices


def local_parameters(
    module: torch.nn.Module,
    summed: Iterable[str],
    stacked: Mapping[str, Exchange] | None = None,
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
    """Returns the tensors that forward reads in place of the parameters, by name."""
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
