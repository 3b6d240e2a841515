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
    made = run(
        _NAME, _NAME, {"x": x, "scale": scale, "amax": amax},
        [*wanted(_NAME, rowwise, columnwise), "scale_inv", *["dbias"] * bool(with_dbias)],
        dtypes={"F": dtype}, ranks=ranks,
    )  # fmt: skip
    return CastTransposeOutput(*map(made.get, CastTransposeOutput._fields))
