"""Result type of the ops that write FP8, and the results that they ask a C function for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from . import _checks
from ._checked import checked
from ._contract import run

__all__ = ["FP8Output", "sides"]


class FP8Output(NamedTuple):
    """FP8 data of a matrix [rows, cols]; None for a result that was not requested.

    Attributes:
        rowwise: FP8 [rows, cols].
        columnwise: FP8 [cols, rows], the transpose.
        scale_inv: one float32 element, 1 / scale.
        amax: one float32 element, the maximum of the given amax and that of the matrix.
    """

    rowwise: jax.Array | None
    columnwise: jax.Array | None
    scale_inv: jax.Array
    amax: jax.Array | None


@checked
def sides(
    function: str, x: jax.Array, flatten_axis: int | None
) -> tuple[jax.Array, dict[str, int]]:
    """Returns a checked array that is cast as a matrix, and its dimensions {"r": rows, "c":
    columns}.

    Raises TypeError for another dtype than float32, float16 and bfloat16, and ValueError if
    ``flatten_axis``, the first dimension of columns, leaves none for rows or columns, or is None
    and ``x`` does not have two dimensions.
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


def wanted(function: str, rowwise: bool, columnwise: bool, amax: Any = None) -> list[str]:
    """Returns the names of the copies to make; none are fine where an amax is to be updated."""
    if not (rowwise or columnwise or amax is not None):
        raise ValueError(f"{function}: rowwise or columnwise must be True, got False for both")
    return ["rowwise"] * bool(rowwise) + ["columnwise"] * bool(columnwise)


def cast_of_activation(
    op: str,
    function: str,
    given: Mapping[str, Any],
    fp8_dtype: Any,
    rowwise: bool,
    columnwise: bool,
    with_dbias: bool = False,
    **options: Any,
) -> tuple[FP8Output, jax.Array | None]:
    """Calls an activation's function with FP8 output; returns it, and its column sums or None."""
    x = _checks.has_columns(function, "x", given["x"])
    made = run(
        op, function, given,
        [*wanted(function, rowwise, columnwise), "scale_inv", *["dbias"] * bool(with_dbias)],
        dtypes={"F": _checks.fp8_dtype_of(function, fp8_dtype)}, ranks={"r": x.ndim - 1},
        as_matrices=True, **options,
    )  # fmt: skip
    return FP8Output(*map(made.get, FP8Output._fields)), made.get("dbias")
