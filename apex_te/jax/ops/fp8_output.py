"""Result type of the ops that write FP8, and the results that they ask a C function for."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["FP8Output", "copies"]


class FP8Output(NamedTuple):
    """FP8 data of a matrix [rows, cols]; None for what was not asked for.

    Attributes:
        rowwise: FP8 [rows, cols].
        columnwise: FP8 [cols, rows].
        scale_inv: one float32 element, 1 / scale.
        amax: one float32 element, the given amax or the matrix's own, whichever is larger.
    """

    rowwise: jax.Array | None
    columnwise: jax.Array | None
    scale_inv: jax.Array
    amax: jax.Array | None


def copies(
    function: str, shape: tuple[int, ...], fp8_dtype: str, rowwise: bool, columnwise: bool
) -> dict[str, Any]:
    """Returns the copies to ask for as results of a call, of a matrix of ``shape``.

    Raises:
        ValueError: neither copy is wanted.
    """
    if not (rowwise or columnwise):
        raise ValueError(f"{function}: rowwise or columnwise must be True, got False for both")
    (rows, cols), dtype = shape, jnp.dtype(fp8_dtype)
    wanted = {"rowwise": (rows, cols) if rowwise else None,
              "columnwise": (cols, rows) if columnwise else None}  # fmt: skip
    return {n: jax.ShapeDtypeStruct(s, dtype) for n, s in wanted.items() if s is not None}
