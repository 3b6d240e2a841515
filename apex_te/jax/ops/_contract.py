"""Calls of C functions by their contracts: checks, shapes of results, and rules for sharding."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from ...contract import Bindings, Contract, Param
from .._call import call
from .._library import contract_of
from . import _checks
from ._rows import rowwise


def run(
    op: str,
    function: str,
    given: Mapping[str, Any],
    outputs: Collection[str] = (),
    *,
    dtypes: Mapping[str, str] | None = None,
    ranks: Mapping[str, int] | None = None,
    as_matrices: bool = False,
    one_by_one: bool = False,
    dims: Mapping[str, str] | None = None,
    **options: Any,
) -> dict[str, jax.Array]:
    """Checks the arguments of a C function and calls it; returns its results by parameter.

    Args:
        op, function: names of the op and of a function that its header declares.
        given: the tensors by parameter. One that the function reads and writes is a result, too.
        outputs: optional results that are wanted. Results are not padded.
        dtypes, ranks: as in ``Bindings``.
        as_matrices: join the dimensions of each letter after the checks.
        one_by_one: ``jax.vmap`` makes a call for each element; devices share nothing.
        dims: dimensions, in the rule, of tensors whose contract leaves them open.
        options: the scalars.
    """
    contract = contract_of(op, function)
    asked = [*(name for name, x in given.items() if x is not None), *outputs]
    bound = Bindings(options | contract.presence(asked), ranks, dtypes)
    inputs = _checked(contract, function, given, bound)
    is_row = 0 in bound.ranks.values()
    if as_matrices or is_row:
        for name, x in inputs.items():
            own = [d.name for d in contract.params[name].dims if d.is_letter]
            if own:
                inputs[name] = x.reshape([math.prod(bound.extents[each]) for each in own])
    results = [p for p in _written(contract, inputs, outputs) if p.name != "workspace"]

    def body(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        arguments = dict(zip(inputs, arrays, strict=True))
        found = local_call(op, function, arguments, outputs, bound.dtypes, **options)
        return tuple(found[p.name] for p in results)

    places = {n: _dims(p, bound) for n, p in contract.params.items()} | dict(dims or {})
    read = ", ".join(f"{n}: {places[n]}" for n in inputs)
    written = ", ".join(f"{p.name}: {p.reduction} {places[p.name]}" for p in results)
    letters = (d for p in contract.params.values() for d in bound.dims(p))
    split = {d.name for d in letters if not d.arguments} - contract.whole
    own_ranks = {} if as_matrices or is_row else bound.ranks
    mapped = (
        sequential_vmap(body)
        if one_by_one
        else rowwise(function, f"{read} -> {written}", body, split=" ".join(split), ranks=own_ranks)
    )
    found = dict(zip((p.name for p in results), mapped(*inputs.values()), strict=True))
    if is_row and not as_matrices:
        return {p.name: found[p.name].reshape(bound.shape(p)) for p in results}
    return found


def whole_call(
    op: str,
    function: str,
    given: Mapping[str, Any],
    outputs: Collection[str] = (),
    dtypes: Mapping[str, str] | None = None,
    extents: Mapping[str, int] | None = None,
    **options: Any,
) -> dict[str, jax.Array]:
    """Checks the arguments of a C function that is not mapped or sharded, and calls it.

    Args:
        extents: of letters that no argument binds, or only one that follows their first use.
    """
    contract = contract_of(op, function)
    bound = Bindings(options, None, dtypes)
    bound.extents |= {letter: (n,) for letter, n in (extents or {}).items()}
    inputs = _checked(contract, function, given, bound)
    return local_call(op, function, inputs, outputs, bound.dtypes, extents, **options)


def local_call(
    op: str,
    function: str,
    arguments: Mapping[str, jax.Array],
    outputs: Collection[str] = (),
    dtypes: Mapping[str, str] | None = None,
    extents: Mapping[str, int] | None = None,
    **options: Any,
) -> dict[str, jax.Array]:
    """Calls a C function on the arrays of one device, as ``run`` does, without checks."""
    contract = contract_of(op, function)
    bound = Bindings(options | contract.presence([*arguments, *outputs]), None, dtypes)
    bound.extents |= {letter: (n,) for letter, n in (extents or {}).items()}
    for name, x in arguments.items():
        bound.bind(contract.params[name], x.shape, x.dtype.name)
    padded = {name: _fitted(contract.params[name], x, bound) for name, x in arguments.items()}
    written = _written(contract, arguments, outputs)
    shapes = {
        p.name: jax.ShapeDtypeStruct(bound.shape(p), jnp.dtype(bound.allowed(p)[0]))
        for p in written
        if p.name not in arguments
    }
    found = call(op, function, shapes, **padded, **options)
    return {p.name: _fitted(p, found[p.name], bound, padded=False) for p in written}


def _checked(
    contract: Contract, function: str, given: Mapping[str, Any], bound: Bindings
) -> dict[str, jax.Array]:
    """Returns the arrays that are given after the C function's checks, and binds their letters."""
    inputs: dict[str, jax.Array] = {}
    names = list(contract.params)

    def order(p: Param) -> tuple[int, bool]:  # what has another parameter's shape follows it
        return max(names.index(p.name), names.index(p.like or p.name)), p.like is not None

    for p in sorted(contract.params.values(), key=order):
        if p.name not in given or (given[p.name] is None and p.is_optional):
            continue
        allowed = bound.allowed(p)
        if not p.dims:
            x = _checks.array(function, p.name, given[p.name])
        elif p.is_scalar:
            x = _checks.is_scalar(function, p.name, given[p.name], allowed[0])
        else:
            x = _checks.has_dtype(function, p.name, given[p.name], allowed)
            if p.like is not None:
                _checks.is_like(function, p.name, x, p.like, bound.extents[p.like])
            elif bound.binds(p) and any(d.is_open for d in p.dims):
                _checks.has_columns(function, p.name, x)
            elif bound.binds(p):
                _checks.has_ndim(function, p.name, x, bound.rank(p, x.ndim), allowed)
        bound.bind(p, x.shape, x.dtype.name)
        if p.dims and not p.is_scalar:
            _checks.has_shape(function, p.name, x, bound.shape(p))
        inputs[p.name] = x
    return {
        name: _fitted(p, inputs[name], bound, padded=False)
        for name, p in contract.params.items()
        if name in inputs
    }


def _written(
    contract: Contract, arguments: Collection[str], outputs: Collection[str]
) -> list[Param]:
    """Returns the parameters that a call writes, given its arguments and optional results."""
    asked = {*arguments, *outputs}
    return [
        p
        for p in contract.params.values()
        if p.is_written
        and (asked & {*p.follows} if p.follows else p.name in asked or not p.is_optional)
    ]


def _dims(p: Param, bound: Bindings) -> str:
    """Returns the dimensions of a parameter in a rule of ``_rule``."""
    found = []
    for d in bound.dims(p):
        block = f"/{d.block}" if d.block > 1 else ""
        found.append(f"{d.name}{block}" if d.name and d.times == 1 and not d.arguments else "_")
    return " ".join(found)


def _fitted(p: Param, x: jax.Array, bound: Bindings, *, padded: bool | None = None) -> jax.Array:
    """Returns an array with the padding of its contract, or without; scales are padded with 1."""
    if not any(d.multiple > 1 for d in bound.dims(p)):
        return x
    shape = bound.shape(p, padded=padded)
    edges = [(0, new - old, 0) for new, old in zip(shape, x.shape, strict=True)]
    return jax.lax.pad(x, jnp.ones((), x.dtype), edges)
