"""Rotary position embedding: rotates pairs of a head's elements by angles of their position."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._call import call
from . import _checks
from ._checked import checked
from ._gradient import materialised
from ._rows import rowwise_by_name

__all__ = ["rope"]

_LAYOUTS = ("sbhd", "bshd", "thd")
_LARGEST_DIM = 8192
_FARTHEST = 1 << 40
# The dimension into which jax.vmap folds, "r", is the batch; of packed sequences the heads.
_RULES = {"sbhd": "s r h d", "bshd": "r s h d", "thd": "t r d"}


@checked
def rope(
    x: jax.Array,
    freqs: jax.Array | None = None,
    *,
    cos: jax.Array | None = None,
    sin: jax.Array | None = None,
    layout: str = "sbhd",
    interleaved: bool = False,
    rotary_dim: int | None = None,
    start: int = 0,
    starts: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
) -> jax.Array:
    """Rotates each pair (a, b) by its angle t to (a cos t - b sin t, b cos t + a sin t).

    It is differentiable with respect to x only. The angle is ``freqs[position, pair]``. With
    ``starts`` or ``cu_seqlens`` a position outside the table gives NaN. With "thd" a token that is
    in no sequence is rotated by the angle 0.

    Args:
        x: float32, float16 or bfloat16 of shape [s, b, h, d] (sbhd), [b, s, h, d] (bshd) or [t, h,
            d] (thd).
        freqs: angles in radians, float32, float16 or bfloat16 [max_seq, c] or [max_seq, 1, 1, c].
            If c is rotary_dim / 2, it has one column for each pair. If c is rotary_dim, it has one
            for each element; both elements of a pair must have equal angles, and the first is read.
        cos, sin: cosines and sines of the angles, in the shape of ``freqs``; give both instead of
            ``freqs``.
        layout: order of the dimensions of x: "sbhd", "bshd" or "thd".
        interleaved: pair neighbours, (2i, 2i + 1), instead of (i, i + rotary_dim / 2).
        rotary_dim: number of elements of a head that are rotated, even, at most d and 8192; None
            stands for c. Other elements are copied.
        start: position of each sequence's first token.
        starts: int32 or int64 [batch], added to ``start`` for each sequence.
        cu_seqlens: int32 [batch + 1], ascending, for "thd": sequence i is tokens cu_seqlens[i] to
            cu_seqlens[i + 1] - 1.

    Returns:
        An array of x's shape and dtype.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or option does not match; both or neither of ``freqs`` and the pair
            ``cos``, ``sin`` given; ``cu_seqlens`` missing for "thd" or given for another layout; or
            the table has fewer positions than x.
        NotImplementedError: ``rotary_dim`` is above 8192, or the angles require a gradient.
    """
    if layout not in _LAYOUTS:
        raise ValueError(f"rope: layout must be 'sbhd', 'bshd' or 'thd', got {layout!r}")
    x = _checks.has_ndim("rope_fwd", "x", x, 3 if layout == "thd" else 4)
    given = {"freqs": freqs, "cos": cos, "sin": sin}
    tables = {name: _table(name, t) for name, t in given.items() if t is not None}
    if rotary_dim is None:
        rotary_dim = next((t.shape[-1] for n, t in tables.items() if n != "sin"), 0)
    _check_tables(x, tables, rotary_dim)
    others = {"starts": starts, "cu_seqlens": cu_seqlens}
    places = {name: jnp.asarray(value) for name, value in others.items() if value is not None}
    length = next((len(t) for t in tables.values()), 0)
    _check_places(x, places, length, layout, start)
    return _differentiable(rotary_dim, start, layout, bool(interleaved))(x, {**tables, **places})


def _table(name: str, table: Any) -> jax.Array:
    """Returns angles, cosines or sines as [max_seq, c] float32."""
    table = _checks.array("rope_fwd", name, table)
    if table.dtype.name in ("float16", "bfloat16"):
        table = table.astype(jnp.float32)
    if table.ndim > 2 and all(extent == 1 for extent in table.shape[1:-1]):
        table = table.reshape(table.shape[0], table.shape[-1])
    return table


def _check_tables(x: jax.Array, tables: dict[str, jax.Array], rotary_dim: int) -> None:
    """Checks the number of rotated elements, and that the tables have a column for each or pair."""
    name, head_dim = "rope_fwd", x.shape[-1]
    if not 0 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise ValueError(
            f"{name}: rotary_dim must be even and from 0 to {head_dim}, got {rotary_dim}"
        )
    if rotary_dim > _LARGEST_DIM:
        raise NotImplementedError(
            f"{name}: rotary_dim must be at most {_LARGEST_DIM}, got {rotary_dim}"
        )
    if sorted(tables) not in (["freqs"], ["cos", "sin"]):
        raise ValueError(f"{name}: freqs, or cos and sin, must be given")
    first = next(iter(tables))
    table = _checks.has_ndim(name, first, tables[first], 2, ["float32"])
    columns = table.shape[1]
    if rotary_dim not in (columns, 2 * columns):
        raise ValueError(
            f"{name}: {first} must have rotary_dim = {rotary_dim} or half as many columns,"
            f" got {columns}"
        )
    if "sin" in tables:
        _checks.same_shape(name, "sin", tables["sin"], table)


def _check_places(
    x: jax.Array, places: dict[str, jax.Array], length: int, layout: str, start: int
) -> None:
    """Checks what says where sequences begin."""
    name = "rope_fwd"
    if ("cu_seqlens" in places) != (layout == "thd"):
        raise ValueError(f"{name}: cu_seqlens must be given with layout thd and with no other")
    sequences, tokens = {"sbhd": (1, 0), "bshd": (0, 1), "thd": (0, 0)}[layout]
    count = x.shape[sequences]
    if layout == "thd":
        bounds = _checks.has_ndim(name, "cu_seqlens", places["cu_seqlens"], 1, ["int32"])
        if bounds.size == 0:
            raise ValueError(f"{name}: cu_seqlens must have batch + 1 elements, got none")
        count = bounds.size - 1
    if "starts" in places:
        _checks.has_dtype(name, "starts", places["starts"], ["int32", "int64"], (count,))
    needed = 0 if places else x.shape[tokens]
    if not 0 <= start <= _FARTHEST or (needed and needed > length - start):
        raise ValueError(
            f"{name}: start must be at least 0 and leave {needed} positions in a table of {length},"
            f" got {start}"
        )


@functools.lru_cache(maxsize=256)
def _differentiable(
    rotary_dim: int, start: int, layout: str, interleaved: bool
) -> Callable[[Any, dict[str, Any]], Any]:
    """Returns the rotation of (x, the other tensors by parameter), differentiable in x alone."""

    def rotated(function: str, x: Any, others: dict[str, Any]) -> Any:
        def body(given: dict[str, jax.Array]) -> dict[str, jax.Array]:
            results = {"out": jax.ShapeDtypeStruct(given["x"].shape, x.dtype)}
            options = {"rotary_dim": rotary_dim, "start": start, "interleaved": interleaved}
            options["layout"] = _LAYOUTS.index(layout)
            return call("rope", function, results, **given, **options)

        dims = dict.fromkeys(others, "p c") | {"x": _RULES[layout], "cu_seqlens": "s"}
        dims["starts"] = "s" if layout == "thd" else "r"
        tables = [name for name in others if name not in ("starts", "cu_seqlens")]
        # Where a table has one row for each token, devices may have a part of both.
        is_whole = len(tables) == len(others) and start == 0
        is_whole = is_whole and all(len(others[n]) == x.shape[layout == "bshd"] for n in tables)
        dims |= dict.fromkeys(tables if is_whole else (), "s c")
        inputs, written = {"x": x, **others}, {"out": _RULES[layout]}
        split = "r h s" if is_whole else "r h"
        return rowwise_by_name(function, inputs, dims, written, body, split=split)["out"]

    @jax.custom_vjp
    def rotation(x: Any, others: dict[str, Any]) -> Any:
        return rotated("rope_fwd", x, others)

    def fwd(x: Any, others: dict[str, Any]) -> tuple[Any, Any]:
        for name in ("freqs", "cos", "sin"):
            if name in others and others[name].perturbed:
                raise NotImplementedError(
                    f"rope: {name} must not require a gradient: none is computed"
                )
        values = {name: each.value for name, each in others.items()}
        return rotated("rope_fwd", x.value, values), values

    def bwd(others: dict[str, Any], grad: Any) -> Any:
        return rotated("rope_bwd", materialised(grad), others), None

    rotation.defvjp(fwd, bwd, symbolic_zeros=True)
    return rotation
