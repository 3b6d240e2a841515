"""Result type of the ops that write FP8, and the results that they ask a C function for."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...runtime import scratch_sizes
from .._call import call
from . import _checks
from ._checked import checked
from ._rows import rowwise as over_rows

__all__ = ["FP8Output", "copies", "fused_cast", "sides"]

_S = jax.ShapeDtypeStruct
_DIMS = {
    "dy": "r c", "x": "r c", "bias": "c", "scale": "_", "amax": "_",
    "rowwise": "r c", "columnwise": "c r", "scale_inv": "_", "dbias": "+ c",
}  # fmt: skip


class FP8Output(NamedTuple):
    """FP8 data of a matrix [rows, cols]; a field that was not asked for is None.

    Attributes:
        rowwise: FP8 [rows, cols].
        columnwise: the transpose, FP8 [cols, rows].
        scale_inv: one float32 element, 1 / scale.
        amax: one float32 element, the maximum of the given amax and the matrix's own; None unless
            an amax was given.
    """

    rowwise: jax.Array | None
    columnwise: jax.Array | None
    scale_inv: jax.Array
    amax: jax.Array | None


@checked
def sides(
    function: str, x: jax.Array, flatten_axis: int | None
) -> tuple[jax.Array, dict[str, int]]:
    """Checks an array that is cast as a matrix, and counts its dimensions of rows and columns.

    Args:
        function: name of the C function, for errors.
        x: the array, float32, float16 or bfloat16.
        flatten_axis: index of the first dimension that counts as columns; None requires an x with
            two dimensions.

    Returns:
        The array, and the numbers of dimensions as {"r": rows, "c": columns}.

    Raises:
        TypeError: ``x`` has a dtype that is not listed.
        ValueError: ``flatten_axis`` leaves no dimension for rows or for columns, or is None and
            ``x`` does not have two dimensions.
    """
    if flatten_axis is None:
        return _checks.matrix_to_cast(function, x), {"r": 1, "c": 1}
    x = _checks.has_dtype(function, "x", x, _checks.FLOATS)
    rows = flatten_axis + x.ndim if flatten_axis < 0 else flatten_axis
    if not 0 < rows < x.ndim:
        raise ValueError(
            f"{function}: flatten_axis must leave rows and columns of {x.ndim} dimensions, got"
            f" {flatten_axis}"
        )
    return x, {"r": rows, "c": x.ndim - rows}


@checked
def copies(
    function: str,
    shape: tuple[int, ...],
    fp8_dtype: str,
    rowwise: bool,
    columnwise: bool,
    amax: Any = None,
) -> dict[str, Any]:
    """Returns shapes and dtypes of the wanted copies of a matrix, by name.

    Args:
        function: name of the C function, for errors.
        shape: (rows, cols) of the matrix.
        fp8_dtype: FP8 dtype of the copies.
        rowwise, columnwise: True for each copy that is wanted.
        amax: the amax that the call updates, or None. If it is given, no copy need be wanted.

    Raises:
        ValueError: ``rowwise`` and ``columnwise`` are False and ``amax`` is None.
    """
    if not (rowwise or columnwise or amax is not None):
        raise ValueError(f"{function}: rowwise or columnwise must be True, got False for both")
    (rows, cols), dtype = shape, jnp.dtype(fp8_dtype)
    wanted = {"rowwise": (rows, cols) if rowwise else None,
              "columnwise": (cols, rows) if columnwise else None}  # fmt: skip
    return {n: jax.ShapeDtypeStruct(s, dtype) for n, s in wanted.items() if s is not None}


@checked
def fused_cast(
    op: str,
    function: str,
    inputs: dict[str, jax.Array],
    options: dict[str, Any],
    scale: Any,
    fp8_dtype: Any,
    rowwise: bool,
    columnwise: bool,
    amax: Any,
    with_dbias: bool = False,
) -> tuple[FP8Output, jax.Array | None]:
    """Calls an activation's function with FP8 output.

    Args:
        op: name of the op's library.
        function: name of the C function.
        inputs: the arrays "x" and, if the function reads them, "dy" and "bias", by name.
        options: the function's scalars, by name.
        scale, fp8_dtype, rowwise, columnwise, amax: as in ``activation_fwd_fp8``.
        with_dbias: also return the sums of the result's columns.

    Returns:
        The FP8 data, and the column sums or None.
    """
    dtype = _checks.fp8_dtype_of(function, fp8_dtype)
    inputs = {**inputs, "scale": _checks.is_scalar(function, "scale", scale)}
    if amax is not None:
        inputs["amax"] = _checks.is_scalar(function, "amax", amax)
    names = [*copies(function, inputs["x"].shape, dtype, rowwise, columnwise), "scale_inv"]
    names += [*(() if amax is None else ("amax",)), *(("dbias",) if with_dbias else ())]

    def body(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        given = dict(zip(inputs, arrays, strict=True))
        rows, cols = given["x"].shape
        results = copies(function, (rows, cols), dtype, rowwise, columnwise)
        results["scale_inv"] = _S(given["scale"].shape, jnp.float32)
        if with_dbias:
            lines = scratch_sizes.lines(rows, scratch_sizes.ACTIVATION_ROWS)
            results["dbias"] = _S((cols,), given["x"].dtype)
            results["workspace"] = _S((lines, cols), jnp.float32)
        made = call(op, function, results, **given, **options)
        return tuple(made[each] for each in names)

    dims = {**_DIMS, "amax": "^"}
    rule = ", ".join(f"{name}: {_DIMS[name]}" for name in inputs)
    rule += " -> " + ", ".join(f"{name}: {dims[name]}" for name in names)
    run = over_rows(function, rule, body, split="r c")
    out = dict(zip(names, run(*inputs.values()), strict=True))
    return FP8Output(*(out.get(name) for name in FP8Output._fields)), out.get("dbias")
