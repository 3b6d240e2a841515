"""Types of operands and results under ``jax.shard_map``: the one module that knows of mesh axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import ManualAxisType, NamedSharding, PartitionSpec

__all__ = ["result_type", "summed_like", "vary_alike"]


def _varying_axes(aval: Any) -> frozenset[str]:
    """Returns the mesh axes of a ``shard_map`` along which an array may differ between devices."""
    return aval.manual_axis_type.varying


def vary_alike(operands: Sequence[Any]) -> list[Any]:
    """Returns the operands, all varying along every axis along which any of them varies."""
    axes = [_varying_axes(jax.typeof(x)) for x in operands]
    union = frozenset[str]().union(*axes)
    if not union:
        return list(operands)
    return [
        jax.lax.pcast(x, tuple(sorted(union - own)), to="varying") if own != union else x
        for x, own in zip(operands, axes, strict=True)
    ]


def result_type(operands: Sequence[Any], shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns the abstract value of a result, which varies along the axes of the operands.

    Args:
        operands: abstract values of the call's operands.
        shape: shape of the result.
        dtype: its dtype.
    """
    union = frozenset[str]().union(*map(_varying_axes, operands))
    mesh = next((x.sharding.mesh for x in operands if not x.sharding.mesh.empty), None)
    if mesh is None:
        return jax.core.ShapedArray(shape, dtype)
    sharding = NamedSharding(mesh, PartitionSpec(*(None for _ in shape)))
    axes = ManualAxisType(varying=union)
    return jax.core.ShapedArray(shape, dtype, sharding=sharding, manual_axis_type=axes)


def summed_like(primal: Any, gradient: Any) -> Any:
    """Returns a gradient summed over the axes of a ``shard_map`` along which its primal is one."""
    extra = _varying_axes(jax.typeof(gradient)) - _varying_axes(jax.typeof(primal))
    return jax.lax.psum(gradient, tuple(sorted(extra))) if extra else gradient
