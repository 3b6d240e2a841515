"""Meshes of several devices: types under ``jax.shard_map``, and parts that each device computes.

Nothing else in this package knows of mesh axes. A bare call of an op on sharded operands would be
gathered by XLA and run whole on every device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, ManualAxisType, NamedSharding, PartitionSpec

from ._rule import Factor, Rule, Term
from .region import active_mesh_resource

_Axes = tuple[str, ...]
_COMBINE: dict[str, Any] = {"+": jax.lax.psum, "^": jax.lax.pmax}


def _varying_axes(aval: Any) -> frozenset[str]:
    """Returns the mesh axes of a ``shard_map`` along which an array may differ between devices."""
    return aval.manual_axis_type.varying


def vary_alike(operands: Sequence[Any]) -> list[Any]:
    """Returns the operands, each cast to vary along all axes along which any of them varies."""
    axes = [_varying_axes(jax.typeof(x)) for x in operands]
    union = varying_along(operands)
    if not union:
        return list(operands)
    return [
        jax.lax.pcast(x, tuple(sorted(union - own)), to="varying") if own != union else x
        for x, own in zip(operands, axes, strict=True)
    ]


def axis_of(owner: str, argument: str, name: Any) -> tuple[int, bool]:
    """Returns the extent of an axis of the present mesh, and whether it is Manual."""
    mesh = jax.sharding.get_abstract_mesh()
    if not isinstance(name, str):
        raise TypeError(
            f"{owner}: {argument} must be the name of a mesh axis, got {type(name).__name__}"
        )
    if name not in mesh.axis_names:
        raise ValueError(
            f"{owner}: {argument} must be an axis of the mesh of jax.shard_map or jax.set_mesh,"
            f" whose axes are {list(mesh.axis_names)}, got {name!r}"
        )
    return mesh.shape[name], name in _axes_of(mesh, AxisType.Manual)


def _axes_of(mesh: Any, kind: AxisType) -> list[str]:
    """Returns the names of a mesh's axes of one kind."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return [name for name, each in kinds if each is kind]


def free_axes(names: Iterable[str | None], *extents: int) -> _Axes:
    """Returns those names that are axes of the present mesh and not Manual.

    It is none of them unless their devices together divide the extents.
    """
    mesh = jax.sharding.get_abstract_mesh()
    free = {*mesh.axis_names} - {*_axes_of(mesh, AxisType.Manual)}
    found = tuple(name for name in names if name is not None and name in free)
    size = math.prod(mesh.shape[name] for name in found)
    return () if any(extent % size for extent in extents) else found


def varying_along(arrays: Iterable[Any]) -> frozenset[str]:
    """Returns the axes of a ``shard_map`` along which any of some arrays may differ."""
    return frozenset[str]().union(*(_varying_axes(jax.typeof(x)) for x in arrays))


def result_type(operands: Sequence[Any], shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns the abstract value of a result, which varies along the axes of the operands."""
    union = frozenset[str]().union(*map(_varying_axes, operands))
    mesh = next((x.sharding.mesh for x in operands if not x.sharding.mesh.empty), None)
    if mesh is None:
        return jax.core.ShapedArray(shape, dtype)
    sharding = NamedSharding(mesh, PartitionSpec(*(None for _ in shape)))
    axes = ManualAxisType(varying=union)
    return jax.core.ShapedArray(shape, dtype, sharding=sharding, manual_axis_type=axes)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Kind:
    """Type of an array with its mesh axes, which a gradient rule keeps instead of the array."""

    aval: Any


def _type(x: Any) -> Any:
    """Returns the type of an array or ``Kind``."""
    return x.aval if isinstance(x, Kind) else jax.typeof(x)


def gradient_like(primal: Any, gradient: Any) -> Any:
    """Returns a gradient summed and sharded to match its primal; None gives None.

    It is summed over the axes of a ``shard_map`` along which the gradient varies and the primal
    does not. On Explicit axes it gets the primal's sharding.
    """
    if gradient is None:
        return None
    kind, own = _type(primal), jax.typeof(gradient)
    extra = _varying_axes(own) - _varying_axes(kind)
    if extra:
        return jax.lax.psum(gradient, tuple(sorted(extra)))
    if AxisType.Explicit in set(kind.sharding.mesh.axis_types) and own.sharding != kind.sharding:
        return jax.sharding.reshard(gradient, kind.sharding)
    return gradient


def same_on_all(primal: Any, amax: Any) -> Any:
    """Returns the maximum of ``amax`` over axes of a ``shard_map`` that ``primal`` lacks.

    These are the axes along which the amax varies and the primal does not.
    """
    extra = _varying_axes(jax.typeof(amax)) - _varying_axes(_type(primal))
    return jax.lax.pmax(amax, tuple(sorted(extra))) if extra else amax


def maximum_over(x: jax.Array, axis_names: tuple[str, ...]) -> jax.Array:
    """Returns the maximum over axes of the enclosing ``shard_map``."""
    return jax.lax.pmax(x, axis_names)


def _explicit_mesh(arrays: Iterable[Any]) -> Any:
    """Returns the first mesh with Explicit and no Manual axes that an array is on, or None."""
    for x in arrays:
        mesh = jax.typeof(x).sharding.mesh
        kinds = set() if mesh.empty else set(mesh.axis_types)
        if AxisType.Explicit in kinds and AxisType.Manual not in kinds:
            return mesh
    return None


def constrained(x: jax.Array, spec: PartitionSpec, otherwise: Callable[..., Any]) -> jax.Array:
    """Returns an array with the sharding of a PartitionSpec.

    Inside of ``shard_map`` it is returned unchanged; without Explicit axes the result is
    ``otherwise(x)``.
    """
    mesh = _explicit_mesh([x])
    if mesh is not None:
        return jax.sharding.reshard(x, NamedSharding(mesh, spec))
    return x if AxisType.Manual in set(jax.typeof(x).sharding.mesh.axis_types) else otherwise(x)


def last_dimension_parts(x: jax.Array, spec: PartitionSpec) -> int:
    """Returns the number of shards of an array's last dimension, as far as it is known."""
    own = jax.typeof(x).sharding
    mesh = own.mesh if not own.mesh.empty else jax.sharding.get_abstract_mesh()
    if mesh.empty or AxisType.Manual in set(mesh.axis_types):
        return 1
    spec = own.spec if _explicit_mesh([x]) is not None else spec
    names = _names(spec[x.ndim - 1]) if len(spec) == x.ndim else ()
    return math.prod(mesh.shape[name] for name in names)


def check_batch(owner: str, x: jax.Array, batch: int) -> None:
    """Raises NotImplementedError if Explicit axes split one of an array's first dimensions."""
    if _explicit_mesh([x]) is None:
        return
    spec = tuple(jax.typeof(x).sharding.spec)[:batch]
    if any(entry is not None for entry in spec):
        raise NotImplementedError(
            f"{owner}: batch dimensions must be split over Auto axes or inside of jax.shard_map,"
            f" got {spec} on Explicit axes"
        )


def product_sharding(x: jax.Array, kernel: jax.Array, inner: int) -> Any:
    """Returns the sharding of x [..., in...] @ kernel [in..., out...] on Explicit axes, where JAX
    cannot choose it; None elsewhere.
    """
    mesh = _explicit_mesh([x, kernel])
    if mesh is None:
        return None
    used: set[str] = set()
    entries = []
    specs = jax.typeof(x).sharding.spec, jax.typeof(kernel).sharding.spec
    rows = tuple(specs[0]) + (None,) * (x.ndim - len(specs[0]))
    cols = tuple(specs[1]) + (None,) * (kernel.ndim - len(specs[1]))
    for entry in (*rows[: x.ndim - inner], *cols[inner:]):
        axes = tuple(name for name in _names(entry) if name not in used)
        used.update(axes)
        entries.append(axes or None)
    return NamedSharding(mesh, PartitionSpec(*entries))


def _names(entry: Any) -> _Axes:
    """Returns the mesh axes of one entry of a PartitionSpec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


class _Split:
    """Mesh axes that split the dimensions of a rule's arrays.

    A mesh axis splits at most one of the dimensions that arrays tie together: the first, in the
    order of operands and then results, that is sharded along it and that it divides.
    """

    def __init__(
        self, rule: Rule, mesh: Any, values: Sequence[Any], usable: Iterable[str] | None = None
    ) -> None:
        self.rule = rule
        self.extents = rule.extents([v.shape for v in values])
        self.axes: dict[Factor, _Axes] = {}
        islands = rule.islands()
        every = mesh.axis_names if usable is None else tuple(usable)
        free = {island: set(every) for island in islands.values()}
        for term, value in zip((*rule.operands, *rule.results), values, strict=False):
            spec = getattr(value.sharding, "spec", None) or ()
            factors = rule.factors(term, len(value.shape), self.extents)
            for factor, entry in zip(factors, spec, strict=False):
                if factor is None or factor in self.axes:
                    continue
                left = free[islands[factor.name]]
                axes = tuple(name for name in _names(entry) if name in left)
                size = math.prod(mesh.shape[name] for name in axes)
                if axes and self.extents[factor.name][factor.place] % size == 0:
                    self.axes[factor] = axes
                    left.difference_update(axes)
        parts = {f: math.prod(mesh.shape[a] for a in axes) for f, axes in self.axes.items()}
        rule.check_blocks(self.extents, parts)

    def spec(self, term: Term, rank: int) -> PartitionSpec:
        """Returns the PartitionSpec of an array of the given rank."""
        factors = self.rule.factors(term, rank, self.extents)
        return PartitionSpec(*(self.axes.get(f) if f else None for f in factors))

    def reduced_axes(self) -> list[_Axes]:
        """Returns for each result the mesh axes over which it must be combined."""
        found = []
        for term in self.rule.results:
            own = {name for name, _ in term.dims}
            lacking = [axes for f, axes in self.axes.items() if f.name not in own]
            found.append(sum(lacking, ()) if term.reduction else ())
        return found


def _on_one_device(
    rule: Rule,
    body: Callable[..., tuple[Any, ...]],
    reduced: Callable[..., tuple[Any, ...]] | None,
    axes: Sequence[_Axes],
) -> Callable[..., tuple[Any, ...]]:
    """Returns one device's function: ``reduced`` if a result must be combined, else ``body``."""
    by_name = {t.name: (t.reduction, a) for t, a in zip(rule.results, axes, strict=True)}

    def reduce(name: str, x: Any) -> Any:
        how, over = by_name[name]
        return _COMBINE[how](x, over) if over else x

    def local(*args: Any) -> tuple[Any, ...]:
        extents = rule.extents([x.shape for x in args])
        flat = [rule.flat(t, x, extents) for t, x in zip(rule.operands, args, strict=True)]
        if reduced is not None and any(axes):
            made = reduced(reduce, *flat)
        else:
            made = body(*flat)
            made = tuple(reduce(t.name, x) for t, x in zip(rule.results, made, strict=True))
        return tuple(rule.unflat(t, x, extents) for t, x in zip(rule.results, made, strict=True))

    return local


def _amax_axes(mesh: Any, args: Sequence[Any]) -> _Axes:
    """Returns the region's amax axes that are Manual and along which an operand varies."""
    manual = _axes_of(mesh, AxisType.Manual)
    axes = tuple(name for name in active_mesh_resource().amax_axes if name in manual)
    if not axes:
        return ()
    probe = jax.lax.pcast(jax.numpy.float32(0), axes, to="varying")
    if not _varying_axes(jax.typeof(probe)):
        return axes  # shard_map was told not to check along what arrays vary
    varying = varying_along(args)
    return tuple(name for name in axes if name in varying)


def shared(
    rule: Rule,
    body: Callable[..., tuple[Any, ...]],
    reduced: Callable[..., tuple[Any, ...]] | None = None,
) -> Callable[..., tuple[Any, ...]]:
    """Returns a function that each device of a mesh computes for its shards.

    Under ``jit`` with Auto axes XLA chooses the shards while it partitions the program. On Explicit
    axes they follow from the operands' types. Inside of ``jax.shard_map`` arrays are shards
    already; only amax values are combined, over the axes that the region's mesh resource names.
    Auto axes beside Explicit or Manual ones are gathered. ``reduced`` is as in ``rowwise``.
    """

    def run(*args: Any) -> tuple[Any, ...]:
        mesh = next((m for x in args if not (m := jax.typeof(x).sharding.mesh).empty), None)
        kinds = set() if mesh is None else set(mesh.axis_types)
        if AxisType.Manual in kinds:
            # Of axes beside the manual ones custom_partitioning is told nothing there.
            axes = _amax_axes(mesh, args)
            over = [axes if term.reduction == "^" else () for term in rule.results]
            return _on_one_device(rule, body, reduced, over)(*args)
        if AxisType.Explicit in kinds:
            return _explicit(args, mesh)
        whole = _on_one_device(rule, body, None, [()] * len(rule.results))
        return whole(*args) if jax.device_count() == 1 else tuple(_automatic(args, whole))

    def _explicit(args: Sequence[Any], mesh: Any) -> tuple[Any, ...]:
        whole = _on_one_device(rule, body, None, [()] * len(rule.results))
        shapes = _result_shapes(whole, args)
        own = frozenset(_axes_of(mesh, AxisType.Explicit))
        split = _Split(rule, mesh, [jax.typeof(x) for x in args], own)
        specs = tuple(split.spec(t, x.ndim) for t, x in zip(rule.operands, args, strict=True))
        out = tuple(split.spec(t, len(s.shape)) for t, s in zip(rule.results, shapes, strict=True))
        placed = [NamedSharding(mesh, spec) for spec in specs]
        moved = [jax.sharding.reshard(x, to) for x, to in zip(args, placed, strict=True)]
        local = _on_one_device(rule, body, reduced, split.reduced_axes())
        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=specs, out_specs=out, axis_names=own, check_vma=False
        )
        return mapped(*moved)

    def _automatic(args: Sequence[Any], whole: Callable[..., Any]) -> Any:
        text, unsplit = _shardy_rule(rule, args, _result_shapes(whole, args))
        split = custom_partitioning(lambda *given: tuple(whole(*given)))
        split.def_partition(
            functools.partial(_partition, rule, body, reduced),
            sharding_rule=text,
            need_replication_factors=unsplit,
        )
        return split(*args)

    return run


def _result_shapes(whole: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Returns shapes and dtypes of a function's results."""
    return jax.eval_shape(whole, *[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args])


def _shardy_rule(rule: Rule, args: Sequence[Any], results: Sequence[Any]) -> tuple[str, Any]:
    """Returns a rule in Shardy's notation, and its factors that must not be split."""
    extents = rule.extents([x.shape for x in (*args, *results)])
    unsplit: list[str] = []

    def text(term: Term, value: Any) -> str:
        names = []
        for factor in rule.factors(term, len(value.shape), extents):
            if factor is None:
                unsplit.append(f"whole{len(unsplit)}")
            names.append(unsplit[-1] if factor is None else f"{factor.name}{factor.place}")
        return " ".join(names)

    sides = [
        ", ".join(text(t, v) for t, v in zip(terms, values, strict=True))
        for terms, values in ((rule.operands, args), (rule.results, results))
    ]
    return " -> ".join(sides), tuple(unsplit)


def _partition(
    rule: Rule,
    body: Callable[..., Any],
    reduced: Callable[..., Any] | None,
    mesh: Any,
    given: Sequence[Any],
    made: Any,
) -> tuple[Any, ...]:
    """Returns what ``custom_partitioning`` asks for: mesh, local function, and shardings."""
    results = jax.tree.leaves(made)
    split = _Split(rule, mesh, [*given, *results])

    def shardings(terms: Sequence[Term], values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(
            NamedSharding(mesh, split.spec(t, len(v.shape)))
            for t, v in zip(terms, values, strict=True)
        )

    local = _on_one_device(rule, body, reduced, split.reduced_axes())
    return mesh, local, shardings(rule.results, results), shardings(rule.operands, given)
