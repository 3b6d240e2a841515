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
    """FP8 data as in ``apex_te.ops.cast_transpose.CastTransposeOutput``, and the new amax.

    None stands for what was not asked for. The columnwise copy is [cols, rows], the transpose.
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

    The result's ``amax`` is the maximum of the given one and max |x|, NaN counting as largest. With
    ``flatten_axis``, the index of the first dimension that counts as columns, x may have more than
    two dimensions. The copies keep them; in the columnwise copy those of the columns come first.
    """
    dtype = _checks.fp8_dtype_of(_NAME, fp8_dtype, fnuz=True)
    x, ranks = sides(_NAME, x, flatten_axis)
    made = run(
        _NAME, _NAME, {"x": x, "scale": scale, "amax": amax},
        [*wanted(_NAME, rowwise, columnwise), "scale_inv", *["dbias"] * bool(with_dbias)],
        dtypes={"F": dtype}, ranks=ranks,
    )  # fmt: skip
    return CastTransposeOutput(*map(made.get, CastTransposeOutput._fields))
