"""Casts a matrix to FP8 with a given scale, to a rowwise copy, a columnwise one or both at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...runtime import scratch_sizes
from .._call import call
from . import _checks
from ._checked import checked
from ._rows import rowwise as over_rows
from .fp8_output import copies, sides

__all__ = ["CastTransposeOutput", "cast_transpose"]

_NAME = "cast_transpose"
_S = jax.ShapeDtypeStruct


class CastTransposeOutput(NamedTuple):
    """FP8 data of a matrix [rows, cols]; a field that was not asked for is None.

    Other fields are as in ``apex_te.ops.cast_transpose.CastTransposeOutput``.

    Attributes:
        columnwise: the transpose, FP8 [cols, rows].
        amax: one float32 element, the maximum of the given amax and max |x|; None unless given.
    """

    rowwise: jax.Array | None
    columnwise: jax.Array | None
    scale_inv: jax.Array
    dbias: jax.Array | None
    amax: jax.Array | None


@checked
def cast_transpose(
    x: jax.Array,
    scale: jax.Array,
    fp8_dtype: Any,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    amax: jax.Array | None = None,
    with_dbias: bool = False,
    flatten_axis: int | None = None,
) -> CastTransposeOutput:
    """Quantizes q = saturating_cast(float(x) * scale), rounded to nearest even; NaN stays NaN.

    Other arguments and errors are as in ``apex_te.ops.cast_transpose.cast_transpose``.

    Args:
        x: [rows, cols] float32, float16 or bfloat16.
        amax: one float32 element or None; the result's ``amax`` is the maximum of it and max |x|,
            where NaN counts as largest.
        flatten_axis: index of the first dimension that counts as columns, for an x with more than
            two dimensions; None requires two. The copies keep x's dimensions; in the columnwise
            copy those of the columns come first.
    """
    dtype = _checks.fp8_dtype_of(_NAME, fp8_dtype, fnuz=True)
    x, ranks = sides(_NAME, x, flatten_axis)
    inputs = {"x": x, "scale": _checks.is_scalar(_NAME, "scale", scale)}
    if amax is not None:
        inputs["amax"] = _checks.is_scalar(_NAME, "amax", amax)
    names = [*copies(_NAME, (1, 1), dtype, rowwise, columnwise), "scale_inv"]
    names += [*(["dbias"] if with_dbias else []), *(["amax"] if amax is not None else [])]

    def body(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        given = dict(zip(inputs, arrays, strict=True))
        rows, cols = given["x"].shape
        results = copies(_NAME, (rows, cols), dtype, rowwise, columnwise)
        results["scale_inv"] = _S(given["scale"].shape, jnp.float32)
        if with_dbias:
            results["dbias"] = _S((cols,), given["x"].dtype)
            lines = scratch_sizes.lines(rows, scratch_sizes.CAST_ROWS)
            results["workspace"] = _S((lines, cols), jnp.float32)
        made = call(_NAME, _NAME, results, **given)
        return tuple(made[each] for each in names)

    dims = {"rowwise": "r c", "columnwise": "c r", "scale_inv": "_", "dbias": "+ c", "amax": "^"}
    rule = ", ".join(f"{n}: {'r c' if n == 'x' else '_'}" for n in inputs)
    rule += " -> " + ", ".join(f"{n}: {dims[n]}" for n in names)
    made = over_rows(_NAME, rule, body, split="r c", ranks=ranks)(*inputs.values())
    out = dict(zip(names, made, strict=True))
    return CastTransposeOutput(*(out.get(name) for name in CastTransposeOutput._fields))
