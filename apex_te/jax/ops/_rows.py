"""Functions over the rows of matrices: ``jax.vmap`` folds the batch into them, meshes share them.

A rule such as "x: r c, weight: c -> y: r c, dweight: +" names the arguments and results of a
function and their dimensions, as ``apex_te.jax._rule`` has it. A "1" is a dimension of extent 1
in the place of "r", which stands for all rows.

Under ``jax.vmap`` an amax is that of all elements, which so share one scale, unless a scale or
another argument without dimensions differs between them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from .._partition import shared
from .._rule import Rule, parse


def rowwise(
    function: str,
    rule: str,
    body: Callable[..., tuple[Any, ...]],
    *,
    split: str = "r",
    ranks: Mapping[str, int] | None = None,
    reduced: Callable[..., tuple[Any, ...]] | None = None,
    fold: str = "r",
) -> Callable[..., Any]:
    """Returns ``body`` as a function that ``jax.vmap`` can map and that can be sharded.

    Args:
        function, rule, split, ranks: as in ``apex_te.jax._rule.parse``.
        body: function of one device's arrays.
        reduced: function that replaces ``body`` if devices must combine results in between. Its
            first argument is a function of a result's name and an array that combines the array.
        fold: dimensions into which ``jax.vmap`` may fold the batch, which is the first of those
            that all mapped arguments have. Without one it calls ``body`` for each element.
    """
    parsed = parse(function, rule, split, ranks or {})
    operands = parsed.operands
    mapped = custom_vmap(shared(parsed, body, reduced))
    texts = rule.partition("->")[0].split(",")
    serves_all = ["1" in text.split() for text in texts]

    def expanded(
        size: int, batched: list[bool], args: tuple[jax.Array, ...], rows: int
    ) -> tuple[Any, Any]:
        """Maps a call in which an array with a "1" has a value of its own for each element."""
        found, terms = list(args), list(texts)
        for i, x in enumerate(args):
            if batched[i] and serves_all[i]:
                axis = texts[i].partition(":")[2].split().index("1") + 1
                found[i] = jnp.broadcast_to(x, (*x.shape[:axis], rows, *x.shape[axis + 1 :]))
                terms[i] = texts[i].replace(" 1", " r")
        text = f"{','.join(terms)}->{rule.partition('->')[2]}"
        own = rowwise(function, text, body, split=split, ranks=ranks, reduced=reduced)
        made = jax.vmap(own, [0 if each else None for each in batched], axis_size=size)(*found)
        return made, tuple(True for _ in made)

    @mapped.def_vmap
    def _batched(size: int, batched: list[bool], *args: jax.Array) -> tuple[Any, Any]:
        extents = parsed.extents(
            [x.shape[is_batched:] for x, is_batched in zip(args, batched, strict=True)]
        )
        if any(map(operator.and_, batched, serves_all)):
            return expanded(size, batched, args, extents["r"][0])
        varying = [term for term, is_batched in zip(operands, batched, strict=True) if is_batched]
        for name in fold.split():
            if all(term.has(name) for term in varying) and parsed.can_fold(name, extents):
                return _folded(mapped, parsed, name, extents, size, batched, args)
        return _beside(parsed, body, reduced, batched)(*args)

    return mapped


def rowwise_by_name(
    function: str, given: Mapping[str, jax.Array], read: Mapping[str, str],
    written: Mapping[str, str], body: Callable[[dict[str, Any]], Mapping[str, Any]], **options: Any,
) -> dict[str, jax.Array]:  # fmt: skip
    """Calls ``rowwise`` of a function of arrays by name, and returns its results by name.

    ``read`` has the dimensions of arguments, "_" where it has none, ``written`` those of results.
    """

    def run(*arrays: jax.Array) -> tuple[Any, ...]:
        made = body(dict(zip(given, arrays, strict=True)))
        return tuple(made[name] for name in written)

    operands = ", ".join(f"{name}: {read.get(name, '_')}" for name in given)
    results = ", ".join(f"{name}: {dims}" for name, dims in written.items())
    made = rowwise(function, f"{operands} -> {results}", run, **options)(*given.values())
    return dict(zip(written, made, strict=True))


def _folded(
    mapped: Callable[..., Any],
    rule: Rule,
    name: str,
    extents: dict[str, tuple[int, ...]],
    size: int,
    batched: list[bool],
    args: Sequence[jax.Array],
) -> tuple[Any, Any]:
    """Maps a call by one with the batch in the dimension ``name``."""
    found = []
    for term, is_batched, x in zip(rule.operands, batched, args, strict=True):
        axis = rule.axis(term, name, extents)
        if axis is not None:
            x = jnp.moveaxis(x if is_batched else jnp.broadcast_to(x, (size, *x.shape)), 0, axis)
            x = x.reshape(*x.shape[:axis], size * x.shape[axis + 1], *x.shape[axis + 2 :])
        found.append(x)
    whole = mapped(*found)
    # Results may have dimensions that no argument has.
    extents = rule.extents([x.shape for x in (*found, *whole)])
    places = [rule.axis(term, name, extents) for term in rule.results]
    made = []
    for axis, x in zip(places, whole, strict=True):
        if axis is not None:
            x = x.reshape(*x.shape[:axis], size, x.shape[axis] // size, *x.shape[axis + 1 :])
            x = jnp.moveaxis(x, axis, 0)
        made.append(x)
    return tuple(made), tuple(axis is not None for axis in places)


def _beside(
    rule: Rule,
    body: Callable[..., tuple[Any, ...]],
    reduced: Callable[..., tuple[Any, ...]] | None,
    batched: list[bool],
) -> Callable[..., tuple[Any, Any]]:
    """Returns a function that maps a call by one for each element.

    Devices share the elements by a further dimension of the rule, into which a batch may be folded.
    """
    terms = (*rule.operands, *rule.results)
    used = {name for term in terms for name, _ in term.dims}
    batch = next(letter for letter in "efghijlopq" if letter not in used)
    own = any(
        not t.dims for t, is_batched in zip(rule.operands, batched, strict=True) if is_batched
    )
    kept = [own or bool(term.dims) or term.reduction == "+" for term in rule.results]

    def each(function: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        def run(*args: Any) -> tuple[Any, ...]:
            def one(chosen: list[Any]) -> tuple[Any, ...]:
                left = iter(chosen)
                pairs = zip(args, batched, strict=True)
                return function(*(next(left) if is_batched else x for x, is_batched in pairs))

            made = jax.lax.map(one, [x for x, b in zip(args, batched, strict=True) if b])
            return tuple(
                x if is_kept else x.max(0) if term.reduction == "^" else x[0]
                for term, is_kept, x in zip(rule.results, kept, made, strict=True)
            )

        return run

    def combined(reduce: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
        assert reduced is not None

        def function(*args: Any) -> tuple[Any, ...]:
            return reduced(reduce, *args)

        return each(function)(*args)

    def text(term: Any, is_batched: bool) -> str:
        dims = [name if block == 1 else f"{name}/{block}" for name, block in term.dims]
        first = [batch] if is_batched else []
        return f"{term.name}: {' '.join([term.reduction, *first, *dims])}"

    sides = (
        ", ".join(text(*pair) for pair in zip(side, which, strict=True))
        for side, which in ((rule.operands, batched), (rule.results, kept))
    )
    run = rowwise(
        rule.function, " -> ".join(sides), each(body), split=" ".join((*rule.split, batch)),
        ranks=rule.ranks, reduced=None if reduced is None else combined, fold=batch,
    )  # fmt: skip
    return lambda *args: (run(*args), tuple(kept))
