"""Meshes of several devices: types under ``jax.shard_map``, and rows that each device computes.

Nothing else in this package knows of mesh axes. A bare call of an op on sharded operands would be
gathered by XLA and run whole on every device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, ManualAxisType, NamedSharding, PartitionSpec

__all__ = ["Term", "by_rows", "result_type", "summed_like", "vary_alike"]


class Term(NamedTuple):
    """One argument or result of a function over the rows of matrices.

    Attributes:
        name: its name.
        axis: number of the dimension of the rows; None without one.
        reduction: "^" for the maximum over all rows, "+" for their sum, else "".
    """

    name: str
    axis: int | None
    reduction: str


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


def _names(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a PartitionSpec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _spec(term: Term, rank: int, axes: tuple[str, ...]) -> PartitionSpec:
    """Returns the PartitionSpec of an array whose rows, and no others, lie on mesh axes."""
    entries: list[Any] = [None] * rank
    if term.axis is not None and axes:
        entries[term.axis] = axes
    return PartitionSpec(*entries)


def _row_axes(terms: Sequence[Term], values: Sequence[Any], mesh: Any) -> tuple[str, ...]:
    """Returns the mesh axes on which the rows of the first sharded operand lie.

    None, where they do not divide the rows: each device then computes all of them.

    Args:
        terms: the operands' terms.
        values: the operands' shapes and shardings.
        mesh: the mesh.
    """
    for term, value in zip(terms, values, strict=True):
        spec = getattr(value.sharding, "spec", None)
        if term.axis is None or spec is None or term.axis >= len(spec):
            continue
        axes = _names(spec[term.axis])
        if axes and value.shape[term.axis] % math.prod(mesh.shape[name] for name in axes) == 0:
            return axes
    return ()


def _reduced(
    terms: Sequence[Term], body: Callable[..., Any], axes: tuple[str, ...]
) -> Callable[..., tuple[Any, ...]]:
    """Returns ``body`` for the rows of one device, with its sums and maxima over all devices."""

    def local(*args: Any) -> tuple[Any, ...]:
        combine = {"+": jax.lax.psum, "^": jax.lax.pmax}
        return tuple(
            combine[term.reduction](x, axes) if axes and term.reduction else x
            for term, x in zip(terms, body(*args), strict=True)
        )

    return local


def _rule(terms: Sequence[Term], values: Sequence[Any], factors: dict[str, int]) -> str:
    """Returns one side of a Shardy rule, in which "r" alone may be sharded.

    Args:
        terms: the arguments or the results.
        values: their shapes.
        factors: dict to which the other dimensions' names and extents are added.
    """
    sides = []
    for term, value in zip(terms, values, strict=True):
        names = []
        for axis in range(len(value.shape)):
            name = "r" if axis == term.axis else f"d{len(factors)}"
            if axis != term.axis:
                factors[name] = value.shape[axis]
            names.append(name)
        sides.append(" ".join(names))
    return ", ".join(sides)


def by_rows(
    operands: Sequence[Term], results: Sequence[Term], body: Callable[..., tuple[Any, ...]]
) -> Callable[..., tuple[Any, ...]]:
    """Returns a function over rows that each device of a mesh computes for its own rows.

    Args:
        operands: terms of the arguments.
        results: terms of the results.
        body: the function, for any number of rows.
    """

    def run(*args: Any) -> tuple[Any, ...]:
        mesh = next((m for x in args if not (m := jax.typeof(x).sharding.mesh).empty), None)
        kinds = set() if mesh is None else set(mesh.axis_types)
        if kinds == {AxisType.Manual}:
            return tuple(body(*args))
        if AxisType.Explicit in kinds and AxisType.Manual not in kinds:
            return _explicit(args, mesh)
        if jax.device_count() == 1:
            return tuple(body(*args))
        return tuple(_automatic(args))

    def _explicit(args: Sequence[Any], mesh: Any) -> tuple[Any, ...]:
        axes = _row_axes(operands, [jax.typeof(x) for x in args], mesh)
        specs = tuple(_spec(t, x.ndim, axes) for t, x in zip(operands, args, strict=True))
        shapes = jax.eval_shape(body, *[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args])
        out = tuple(_spec(t, len(s.shape), axes) for t, s in zip(results, shapes, strict=True))
        placed = [NamedSharding(mesh, spec) for spec in specs]
        moved = [jax.sharding.reshard(x, to) for x, to in zip(args, placed, strict=True)]
        local = _reduced(results, body, axes)
        mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
        return mapped(*moved)

    def _automatic(args: Sequence[Any]) -> Any:
        shapes = jax.eval_shape(body, *[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args])
        factors: dict[str, int] = {}
        rule = f"{_rule(operands, args, factors)} -> {_rule(results, shapes, factors)}"
        split = custom_partitioning(lambda *given: tuple(body(*given)))
        split.def_partition(
            functools.partial(_partition, operands, results, body),
            sharding_rule=rule,
            need_replication_factors=tuple(factors),
        )
        return split(*args)

    return run


def _partition(
    operands: Sequence[Term],
    results: Sequence[Term],
    body: Callable[..., Any],
    mesh: Any,
    given: Sequence[Any],
    made: Any,
) -> tuple[Any, ...]:
    """Returns what ``custom_partitioning`` asks for: mesh, local function, and shardings."""
    axes = _row_axes(operands, given, mesh)

    def shardings(terms: Sequence[Term], values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(
            NamedSharding(mesh, _spec(t, len(v.shape), axes))
            for t, v in zip(terms, values, strict=True)
        )

    local = _reduced(results, body, axes)
    return mesh, local, shardings(results, jax.tree.leaves(made)), shardings(operands, given)
