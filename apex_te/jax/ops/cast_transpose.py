"""Casts a matrix to FP8 with a given scale, to a rowwise copy, a columnwise one or both at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from . import _checks
from ._checked import checked
from ._contract import run
from .fp8_output import sides, wanted

__all__ = ["CastTransposeOutput", "cast_transpose"]

_NAME = "cast_transpose"


class CastTransposeOutput(NamedTuple):
    """FP8 data of a matrix [rows, cols]; None for a result that was not requested.

    Attributes:
        rowwise: FP8 [rows, cols].
        columnwise: FP8 [cols, rows], the transpose.
        scale_inv: one float32 element, 1 / scale.
        dbias: [cols] in the matrix's dtype, its column sums.
        amax: one float32 element, the maximum of the given amax and max |x|.
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

    Args:
        x: [rows, cols] float32, float16 or bfloat16.
        scale: one float32 element.
        fp8_dtype: float8_e4m3fn or float8_e5m2; on a CPU also their fnuz forms.
        rowwise, columnwise: the copies to make: [rows, cols], and its transpose [cols, rows].
        amax: one float32 element; the result's ``amax`` is then max(amax, max |x|), before scaling,
            where NaN counts as largest. None computes no amax.
        with_dbias: also return the column sums of x, in x's dtype (deterministic).
        flatten_axis: index of the first dimension that counts as columns, for x with more than two
            dimensions; None needs a matrix. The copies keep all dimensions; in the columnwise copy
            those of the columns come first.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match, or no copy is requested.
    """
    dtype = _checks.fp8_dtype_of(_NAME, fp8_dtype, fnuz=True)
    x, ranks = sides(_NAME, x, flatten_axis)
    made = run(
        _NAME, _NAME, {"x": x, "scale": scale, "amax": amax},
        [*wanted(_NAME, rowwise, columnwise), "scale_inv", *["dbias"] * bool(with_dbias)],
        dtypes={"F": dtype}, ranks=ranks,
    )  # fmt: skip
    return CastTransposeOutput(*map(made.get, CastTransposeOutput._fields))
