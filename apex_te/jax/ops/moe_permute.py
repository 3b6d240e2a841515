"""Permutes tokens for a mixture of experts: copies them in the order of experts and sums them back.

Maps and shapes are those of ``apex_te.ops.moe_permute``. In a ``jax.shard_map`` all is done on each
device's own tokens.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from ...runtime.scratch_sizes import map_tiles
from .._call import call
from . import _checks
from ._checked import checked
from ._contract import whole_call
from ._gradient import flag, is_wanted, materialised, values_of

__all__ = [
    "MAX_EXPERTS", "RowMap", "make_chunk_map", "make_map", "permute", "permute_bwd", "permute_by",
    "sort_chunks", "tokens_of_rows", "unpermute", "unpermute_bwd",
]  # fmt: skip

# As csrc/moe_permute/moe_permute.h has them.
MAX_EXPERTS = 1024
_MAX_CHUNKS = 2048
_ANY_ROWS = 2**31 - 1
_MOST_ALIGN = 1 << 20
_S = jax.ShapeDtypeStruct
_OP = "moe_permute"


class RowMap(NamedTuple):
    """Map from tokens to rows of the permuted matrix, int32 arrays.

    Attributes:
        row_id_map: opaque, for ``permute``, ``unpermute`` and their backward functions.
        tokens_per_expert: [experts], number of each expert's rows, without dropped copies.
        padded_tokens_per_expert: [experts], the same including padding.
        pad_offsets: [experts], number of padding rows before each expert's first row; None without
            padding.
    """

    row_id_map: jax.Array
    tokens_per_expert: jax.Array
    padded_tokens_per_expert: jax.Array
    pad_offsets: jax.Array | None


class _Routing(NamedTuple):
    """Arguments of the C functions that make a map: ``given`` to read, ``results`` to write."""

    given: dict[str, Any]
    results: dict[str, Any]

    def map_of(self, made: dict[str, Any]) -> RowMap:
        """Returns the map of what a C function has written."""
        table = made["row_id_map"]
        if self.given["is_index"]:
            counts = made["tokens_per_expert"]
            return RowMap(table, counts, counts, None)
        experts = self.given["num_experts"]
        own, padded = slice(1, 1 + experts), slice(1 + experts, 1 + 2 * experts)
        offsets = table[-1][padded] if table.shape[1] % 2 == 0 else None
        return RowMap(table, table[-2][own], table[-2][padded], offsets)


@checked
def make_map(
    routing_map: jax.Array,
    *,
    map_type: str = "mask",
    num_experts: int | None = None,
    align_size: int | None = None,
    num_rows: int | None = None,
) -> RowMap:
    """Makes the map of a permutation that sorts copies of tokens by expert, then by token.

    Args:
        routing_map: for "mask" [tokens, experts] bool, uint8, int8, int32 or int64, nonzero if the
            token goes to the expert. For "index" [tokens, k] int32 or int64 indices of experts; a
            negative index makes no copy.
        map_type: "mask" or "index".
        num_experts: number of experts for "index", at most 1024; None stands for 1024. An index out
            of range raises an error on the CPU, when the program runs; on a GPU it makes the
            token's row NaN in ``unpermute``.
        align_size: each expert's rows begin at a multiple of this; only for "mask". None does not
            pad.
        num_rows: number of rows of the permuted matrix; copies beyond the last row are dropped.
            None drops none.

    Raises:
        TypeError: ``routing_map`` has a dtype that is not listed.
        ValueError: a shape or option does not match.
        NotImplementedError: there are more than 1024 experts, or ``routing_map`` has 2^31 elements
            or more.
    """
    routing = _routing("moe_permute_map", routing_map, map_type, num_experts, align_size)
    rows = _ANY_ROWS if num_rows is None else num_rows
    given = {**routing.given, "num_rows": rows}
    return routing.map_of(call(_OP, "moe_permute_map", routing.results, **given))


def _routing(
    name: str, routing_map: Any, map_type: str, num_experts: int | None, align_size: int | None
) -> _Routing:
    """Returns the arguments of a C function that makes a map, after their checks."""
    if map_type not in ("mask", "index"):
        raise ValueError(f"{_OP}: map_type must be 'mask' or 'index', got {map_type!r}")
    routes = _checks.two_dimensional(_OP, "routing_map", routing_map)
    is_index = map_type == "index"
    tokens, width = routes.shape
    experts = width
    if is_index:
        if align_size is not None:
            raise ValueError(f"{_OP}: align_size must be None for indices, got {align_size}")
        experts = MAX_EXPERTS if num_experts is None else num_experts
    routes = _routes(routes, is_index)
    allowed = ["int32"] if is_index else ["bool", "uint8", "int32"]
    routes = _checks.has_dtype(name, "routing_map", routes, allowed)
    align = 1 if align_size is None else align_size
    _check_routing(name, tokens, width, experts, align)
    columns = 1 + 2 * width + (0 if align_size is None else 1)
    results = {
        "workspace": _S((map_tiles(tokens), experts), jnp.int32),
        "row_id_map": _S((tokens + 2, columns), jnp.int32),
    }
    if is_index:
        results["tokens_per_expert"] = _S((experts,), jnp.int32)
    given = {"routing_map": routes, "num_experts": experts, "align_size": align}
    return _Routing({**given, "is_index": is_index}, results)


def _check_routing(name: str, tokens: int, width: int, experts: int, align: int) -> None:
    """Checks the numbers of a routing, in the words of the C functions."""
    if width < 1:
        raise ValueError(f"{name}: routing_map must have at least 1 column, got 0")
    if experts < 1:
        raise ValueError(
            f"{name}: num_experts must be at least 1 and the columns of a mask, got {experts}"
        )
    if experts > MAX_EXPERTS:
        raise NotImplementedError(
            f"{name}: num_experts must be at most {MAX_EXPERTS}, got {experts}"
        )
    if not 1 <= align <= _MOST_ALIGN:
        raise ValueError(
            f"{name}: align_size must be at least 1 and at most 2^20, and 1 for indices, got"
            f" {align}"
        )
    if tokens * width + experts * align > _ANY_ROWS:
        raise NotImplementedError(f"{name}: routing_map must have fewer than 2^31 elements")


def _routes(routing_map: jax.Array, is_index: bool) -> jax.Array:
    """Returns int64 maps and int8 masks in a dtype that the kernels read, other maps unchanged."""
    dtype = routing_map.dtype.name
    if is_index and dtype == "int64":  # one too large must not become another expert
        return jnp.clip(routing_map, -1, _ANY_ROWS).astype(jnp.int32)
    if not is_index and dtype == "int8":
        return jax.lax.bitcast_convert_type(routing_map, jnp.uint8)
    return routing_map != 0 if not is_index and dtype == "int64" else routing_map


@checked
def permute(
    inp: jax.Array, row_id_map: jax.Array, num_rows: int, probs: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Copies each token's row, and its probs, to the rows given by the map, differentiably.

    Args:
        inp: [tokens, hidden] float32, float16 or bfloat16, or any dtype of one byte.
        row_id_map: from ``make_map``, ``RowMap.row_id_map``.
        num_rows: number of rows of the result; rows without a copy are zeros.
        probs: [tokens, width] float32 or the dtype of ``inp``; width is the number of experts for a
            mask and k for indices.

    Returns:
        (permuted rows [num_rows, hidden], permuted probs [num_rows] or None without probs).

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match, or ``num_rows`` is negative.
    """

    def forward(inp: Any, probs: Any, row_id_map: Any) -> tuple[Any, Any, Any]:
        name = "moe_permute_rows"
        given, results, dtype = _rows_of(name, inp, probs, row_id_map, num_rows)
        made = call(_OP, name, results, **given, row_id_map=row_id_map)
        return _cast(made["out"], dtype), made.get("permuted_probs"), row_id_map

    out, permuted, _ = _permutation(_OP, forward, permute_bwd)(inp, probs, row_id_map)
    return out, permuted


@checked
def permute_by(
    inp: jax.Array,
    routing_map: jax.Array,
    num_rows: int,
    probs: jax.Array | None = None,
    *,
    map_type: str = "mask",
    num_experts: int | None = None,
    align_size: int | None = None,
) -> tuple[jax.Array, jax.Array | None, RowMap]:
    """Computes ``make_map`` and then ``permute`` in one call; their kernels overlap.

    Copies beyond row ``num_rows - 1`` are dropped.

    Args:
        inp: [tokens, hidden] float32, float16 or bfloat16, or any dtype of one byte.
        routing_map, map_type, num_experts, align_size: as in ``make_map``.
        num_rows: number of rows of the result; rows without a copy are zeros.
        probs: [tokens, width] float32 or the dtype of ``inp``; width is the number of experts for a
            mask and k for indices.

    Returns:
        (permuted rows [num_rows, hidden], permuted probs [num_rows] or None without probs, the
        ``RowMap``).

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or option does not match.
        NotImplementedError: there are more than 1024 experts, or ``routing_map`` has 2^31 elements
            or more.
    """
    name = "moe_permute_fwd"

    def forward(inp: Any, probs: Any, routing_map: Any) -> tuple[Any, Any, Any]:
        routing = _routing(name, routing_map, map_type, num_experts, align_size)
        table = routing.results["row_id_map"]
        given, results, dtype = _rows_of(name, inp, probs, table, num_rows)
        made = call(_OP, name, {**routing.results, **results}, **routing.given, **given)
        found = routing.map_of(made)
        return _cast(made["out"], dtype), made.get("permuted_probs"), found

    return _permutation(_OP, forward, permute_bwd)(inp, probs, routing_map)


def _permutation(op: str, forward: Any, backward: Any) -> Any:
    """Returns a differentiable function (inp, probs or None, map) -> (rows, probs, map).

    ``backward`` is a function of the rows' gradients, of the map, and of the probs' or None.
    """
    run = jax.custom_vjp(forward)

    def fwd(inp: Any, probs: Any, routes: Any) -> tuple[Any, Any]:
        wanted = flag(inp), flag(probs)
        if is_wanted(wanted[0]):
            _check_differentiable(op, inp.value)
        out, permuted, found = forward(*values_of((inp, probs, routes)))
        table = found.row_id_map if isinstance(found, RowMap) else found
        return (out, permuted, found), (table, wanted)

    def bwd(kept: Any, cotangents: Any) -> Any:
        (row_id_map, (with_inp, with_probs)), (grad, grad_probs, _) = kept, cotangents
        grad = _known(grad, is_wanted(with_inp))
        grad_probs, has_rows = _known(grad_probs, is_wanted(with_probs)), grad is not None
        if not has_rows and grad_probs is None:
            return None, None, None
        if not has_rows:  # alone, beside rows of no columns
            grad = jnp.zeros((grad_probs.shape[0], 0), jnp.float32)
        made, made_probs = backward(grad, row_id_map, grad_probs)
        return made if has_rows else None, made_probs, None

    run.defvjp(fwd, bwd, symbolic_zeros=True)
    return run


def _known(cotangent: Any, is_needed: bool) -> Any:
    """Returns a cotangent, None where it is not needed or known to be zero."""
    return cotangent if is_needed and not isinstance(cotangent, SymbolicZero) else None


def _rows_of(
    name: str, inp: Any, probs: Any, row_id_map: Any, num_rows: int
) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Returns what a permutation reads and writes of rows and probs, and the dtype of the rows."""
    inp = _checks.two_dimensional(_OP, "inp", inp)
    num_rows = _row_count("num_out_tokens", num_rows)
    tokens, width = _map_shape(name, row_id_map)
    matrix = _checked_rows(name, inp)
    _checks.has_shape(name, "inp", matrix, (tokens, inp.shape[1]))
    given, results = {"inp": matrix}, {"out": _S((num_rows, inp.shape[1]), matrix.dtype)}
    if probs is not None:
        given["probs"] = _checked_probs(name, probs, matrix.dtype, (tokens, width))
        results["permuted_probs"] = _S((num_rows,), given["probs"].dtype)
    return given, results, inp.dtype


def _row_count(name: str, value: Any) -> int:
    """Returns ``value``, which must be an int that is not negative."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{_OP}: {name} must be an int, got {type(value).__name__}")
    if value < 0:
        raise ValueError(f"{_OP}: {name} must be at least 0, got {value}")
    return int(value)


def _checked_rows(name: str, inp: jax.Array) -> jax.Array:
    """Returns rows in a dtype that the kernels copy: of one byte as uint8."""
    if inp.dtype.itemsize == 1 and inp.dtype != jnp.uint8:
        inp = _cast(inp, jnp.uint8)
    return _checks.has_dtype(name, "inp", inp, [*_checks.FLOATS, "uint8"])


def _cast(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns an array of one byte an element in another such dtype, with the same bytes."""
    if x.dtype == dtype:
        return x
    if jnp.bool_ in (x.dtype, dtype):
        return x.astype(dtype)
    return jax.lax.bitcast_convert_type(x, dtype)


def _checked_probs(name: str, probs: Any, dtype: Any, shape: tuple[int, ...]) -> jax.Array:
    allowed: Any = _checks.FLOATS
    if dtype != jnp.uint8:
        allowed = list(dict.fromkeys(["float32", jnp.dtype(dtype).name]))
    return _checks.has_dtype(name, "probs", probs, allowed, shape)


def _map_shape(name: str, row_id_map: Any) -> tuple[int, int]:
    """Returns the numbers of tokens and of copies of a map, or of its shape and dtype."""
    if not isinstance(row_id_map, _S):
        row_id_map = _checks.has_ndim(name, "row_id_map", row_id_map, 2, ["int32"])
    rows, columns = row_id_map.shape
    if rows < 2 or columns < 3:
        raise ValueError(
            f"{name}: row_id_map must be what moe_permute made, got too small a matrix"
        )
    return rows - 2, (columns - 1) // 2


def _check_differentiable(op: str, inp: jax.Array) -> None:
    """Raises TypeError if ``inp``, whose gradient is wanted, is FP8 data."""
    if inp.dtype.name not in _checks.FLOATS:
        raise TypeError(
            f"{op}: inp must have dtype float32, float16 or bfloat16 to have a gradient, "
            f"got {inp.dtype.name}"
        )


@checked
def tokens_of_rows(
    row_id_map: jax.Array, num_rows: int, probs: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the token, and the prob, of each row of the permuted matrix.

    Args:
        row_id_map: from ``make_map``, ``RowMap.row_id_map``.
        num_rows: number of rows of the permuted matrix.
        probs: [tokens, width] float32, float16 or bfloat16; width is the number of experts for a
            mask and k for indices.

    Returns:
        (tokens int32 [num_rows], permuted probs [num_rows] or None without probs). A row without a
        copy has token -1 and prob 0.

    Raises:
        TypeError: an argument has a dtype that is not listed, or ``num_rows`` is not an int.
        ValueError: a shape does not match, or ``num_rows`` is negative.
    """
    name, num_rows = "moe_tokens_of_rows", _row_count("num_rows", num_rows)
    tokens, width = _map_shape(name, row_id_map)
    results, given = {"out": _S((num_rows,), jnp.int32)}, {"row_id_map": row_id_map}
    if probs is not None:
        given["probs"] = _checked_probs(name, probs, jnp.uint8, (tokens, width))
        results["permuted_probs"] = _S((num_rows,), given["probs"].dtype)
    made = call(_OP, name, results, **given)
    return made["out"], made.get("permuted_probs")


@checked
def permute_bwd(
    grad_permuted: jax.Array, row_id_map: jax.Array, grad_permuted_probs: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Computes the gradients of ``permute``.

    Args:
        grad_permuted: gradient of the permuted rows, [num_rows, hidden] float32, float16 or
            bfloat16.
        row_id_map: from ``make_map``, ``RowMap.row_id_map``.
        grad_permuted_probs: gradient of the permuted probs, [num_rows] in their dtype; None without
            probs.

    Returns:
        (gradient of ``inp`` [tokens, hidden], gradient of probs [tokens, width] or None without
        ``grad_permuted_probs``).

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match.
    """
    made = _summed(grad_permuted, row_id_map, None, grad_permuted_probs)
    return made["out"], made.get("grad_probs")


def _summed(inp: Any, row_id_map: Any, probs: Any, grad_permuted_probs: Any) -> dict[str, Any]:
    """Calls the C function that sums copies; returns what it wrote."""
    name = "moe_unpermute_fwd"
    inp = _checks.matrix(name, "inp", inp)
    tokens, width = _map_shape(name, row_id_map)
    given = {"inp": inp, "row_id_map": row_id_map}
    results = {"out": _S((tokens, inp.shape[1]), inp.dtype)}
    if probs is not None:
        given["probs"] = _checked_probs(name, probs, inp.dtype, (tokens, width))
    if grad_permuted_probs is not None:
        grads = _checked_probs(name, grad_permuted_probs, jnp.uint8, inp.shape[:1])
        given["grad_permuted_probs"] = grads
        results["grad_probs"] = _S((tokens, width), grads.dtype)
    return call(_OP, name, results, **given)


@checked
def unpermute(inp: jax.Array, row_id_map: jax.Array, probs: jax.Array | None = None) -> jax.Array:
    """Sums each token's copies, times their probs, in float32 in a fixed order, differentiably.

    Args:
        inp: [rows, hidden] float32, float16 or bfloat16: the experts' results for the permuted
            rows.
        row_id_map: from ``make_map``, ``RowMap.row_id_map``.
        probs: [tokens, width] float32 or the dtype of ``inp``, factors of the copies; None stands
            for ones. Width is the number of experts for a mask and k for indices.

    Returns:
        [tokens, hidden] in the dtype of ``inp``; zeros for a token without copies.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match.
    """
    return _unpermutation(_checks.two_dimensional("moe_unpermute", "inp", inp), row_id_map, probs)


@jax.custom_vjp
def _unpermutation(inp: Any, row_id_map: Any, probs: Any) -> Any:
    return _summed(inp, row_id_map, probs, None)["out"]


def _unpermutation_fwd(inp: Any, row_id_map: Any, probs: Any) -> tuple[Any, Any]:
    factors = None if probs is None else probs.value
    out = _summed(inp.value, row_id_map.value, factors, None)["out"]
    # Without factors backward needs no more of the rows than their number.
    kept = inp.value if probs is not None else inp.value[:, :0]
    return out, (kept, row_id_map.value, factors)


def _unpermutation_bwd(kept: Any, grad_output: Any) -> Any:
    (inp, row_id_map, probs), grad_output = kept, materialised(grad_output)
    if probs is None:
        return permute(grad_output, row_id_map, inp.shape[0])[0], None, None
    grad_inp, grad_probs = unpermute_bwd(grad_output, inp, row_id_map, probs)
    return grad_inp, None, grad_probs


_unpermutation.defvjp(_unpermutation_fwd, _unpermutation_bwd, symbolic_zeros=True)


@checked
def unpermute_bwd(
    grad_output: jax.Array, inp: jax.Array, row_id_map: jax.Array, probs: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes the gradients of ``unpermute`` with probs, in one pass.

    Without probs, the gradient of ``inp`` is the first result of ``permute(grad_output, ...)``.

    Args:
        grad_output: [tokens, hidden] in the dtype of ``inp``.
        inp: [rows, hidden], as passed to ``unpermute``.
        row_id_map: as passed to ``unpermute``.
        probs: [tokens, width], as passed to ``unpermute``; must be given.

    Returns:
        (gradient of ``inp`` [rows, hidden], gradient of ``probs`` [tokens, width]).

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match.
    """
    name = "moe_unpermute_bwd"
    inp = _checks.matrix(name, "inp", inp)
    tokens, width = _map_shape(name, row_id_map)
    probs = _checked_probs(name, probs, inp.dtype, (tokens, width))
    shape = tokens, inp.shape[1]
    grad = _checks.has_dtype(name, "grad_output", grad_output, [inp.dtype.name], shape)
    given = {"grad_output": grad, "inp": inp, "probs": probs, "row_id_map": row_id_map}
    results = {"grad_inp": _S(inp.shape, inp.dtype), "grad_probs": _S(probs.shape, probs.dtype)}
    made = call(_OP, name, results, **given)
    return made["grad_inp"], made["grad_probs"]


@checked
def make_chunk_map(split_sizes: jax.Array, sorted_index: jax.Array, num_rows: int) -> jax.Array:
    """Makes the map by which ``sort_chunks`` reorders chunks of rows.

    Invalid sizes or indices raise an error on the CPU, when the program runs. On a GPU
    ``sort_chunks`` then writes zeros to rows that get no source row.

    Args:
        split_sizes: int32 or int64 [chunks], the number of rows of each chunk, at most ``num_rows``
            in total.
        sorted_index: int32 or int64 [chunks], a permutation; chunk ``sorted_index[i]`` comes i-th
            in the result.
        num_rows: number of rows of the matrix.

    Returns:
        int32 [2, num_rows], opaque, for ``sort_chunks``.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match.
        NotImplementedError: there are more than 2048 chunks.
    """
    name = "moe_sort_chunks_map"
    chunks = _checks.array(name, "split_sizes", split_sizes).size
    if chunks > _MAX_CHUNKS:
        raise NotImplementedError(
            f"{name}: split_sizes must have at most {_MAX_CHUNKS} elements, got {chunks}"
        )
    given = {"split_sizes": split_sizes, "sorted_index": sorted_index}
    return whole_call(_OP, name, given, extents={"r": num_rows})["chunk_map"]


@checked
def sort_chunks(
    inp: jax.Array,
    chunk_map: jax.Array,
    probs: jax.Array | None = None,
    *,
    is_backward: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Reorders rows and their probs by a chunk map, differentiably.

    Args:
        inp: [rows, hidden] float32, float16 or bfloat16, or any dtype of one byte.
        chunk_map: from ``make_chunk_map``.
        probs: [rows] float32, float16 or bfloat16.
        is_backward: apply the inverse of the map, as backward does to gradients.

    Returns:
        (reordered rows [rows, hidden], reordered probs [rows] or None); rows after the last chunk
        are zeros.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match.
    """
    inp = _checks.two_dimensional("moe_sort_chunks", "inp", inp)

    def forward(inp: Any, probs: Any, chunk_map: Any) -> tuple[Any, Any, Any]:
        return *_sorted(inp, chunk_map, probs, is_backward), chunk_map

    backward = functools.partial(_sorted, is_backward=not is_backward)
    out, permuted, _ = _permutation("moe_sort_chunks", forward, backward)(inp, probs, chunk_map)
    return out, permuted


def _sorted(inp: Any, chunk_map: Any, probs: Any, is_backward: bool) -> tuple[Any, Any]:
    """Computes ``sort_chunks``, without a gradient."""
    name = "moe_sort_chunks"
    given = {"inp": _checked_rows(name, inp), "probs": probs, "chunk_map": chunk_map}
    made = whole_call(_OP, name, given, is_backward=bool(is_backward))
    return _cast(made["out"], inp.dtype), made.get("permuted_probs")
