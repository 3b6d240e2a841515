"""Functions over the rows of matrices: ``jax.vmap`` folds the batch into them, meshes share them.

A rule such as "x: r c, weight: c -> y: r c, dweight: +" names the arguments and results of a
function and their dimensions, as ``apex_te.jax._rule`` has it. A "1" is a dimension of extent 1
in the place of "r", which stands for all rows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from .._partition import shared
from .._rule import parse


def rowwise(
    function: str,
    rule: str,
    body: Callable[..., tuple[Any, ...]],
    *,
    split: str = "r",
    ranks: Mapping[str, int] | None = None,
    reduced: Callable[..., tuple[Any, ...]] | None = None,
    one_matrix: bool = False,
) -> Callable[..., Any]:
    """Returns ``body`` as a function that ``jax.vmap`` can map and that can be sharded.

    Args:
        function, rule, split, ranks: as in ``apex_te.jax._rule.parse``.
        body: function of one device's arrays.
        reduced: function that replaces ``body`` if devices must combine results in between. Its
            first argument is a function of a result's name and an array that combines the array.
            ``jax.vmap`` is then refused.
        one_matrix: refuse ``jax.vmap``.
    """
    parsed = parse(function, rule, split, ranks or {})
    operands, results = parsed.operands, parsed.results
    mapped = custom_vmap(shared(parsed, body, reduced))

    def fold(x: jax.Array, axis: int) -> jax.Array:
        x = jnp.moveaxis(x, 0, axis)
        return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])

    def unfold(x: jax.Array, axis: int, size: int) -> jax.Array:
        x = x.reshape(*x.shape[:axis], size, x.shape[axis] // size, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    texts = rule.partition("->")[0].split(",")
    serves_all = ["1" in text.split() for text in texts]

    def expanded(size: int, batched: list[bool], args: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        """Maps a call in which an array with a "1" has a value of its own for each element."""
        rows = next(
            x.shape[term.axis + is_batched]
            for term, is_batched, x in zip(operands, batched, args, strict=True)
            if term.axis is not None
        )
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
        if any(map(operator.and_, batched, serves_all)):
            return expanded(size, batched, args)
        if reduced is not None or one_matrix:
            raise NotImplementedError(
                f"{function}: x must be one matrix, got jax.vmap over several"
            )
        for term, is_batched in zip(operands, batched, strict=True):
            if is_batched and term.axis is None:
                raise NotImplementedError(
                    f"{function}: {term.name} must be the same for all elements of jax.vmap,"
                    " got one for each"
                )
        for term in results:
            if any(block != 1 for _, block in term.dims):
                raise NotImplementedError(
                    f"{function}: {term.name} must have scales of blocks of one matrix, got"
                    " jax.vmap over several"
                )
            if term.reduction == "+":
                raise NotImplementedError(
                    f"{function}: {term.name} must be summed over all rows, got jax.vmap over them"
                )
        rows = []
        for term, is_batched, x in zip(operands, batched, args, strict=True):
            if term.axis is None:
                rows.append(x)
                continue
            whole = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
            rows.append(fold(whole, term.axis))
        found = mapped(*rows)
        out = tuple(
            x if term.axis is None else unfold(x, term.axis, size)
            for term, x in zip(results, found, strict=True)
        )
        return out, tuple(term.axis is not None for term in results)

    return mapped
