"""MXFP8 data of a matrix: FP8 with one power-of-two scale for every 32 elements."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import _checks
from ._checked import checked
from ._contract import local_call, run
from .fp8_output import sides, wanted

__all__ = ["MXQuantized", "mx_dequantize", "mx_quantize"]


class MXQuantized(NamedTuple):
    """MXFP8 data and scales of a matrix [rows, cols]; None for a copy that was not requested.

    Attributes:
        rowwise: FP8 [rows, cols].
        rowwise_scale: float8_e8m0fnu [rows, ceil(cols / 32)].
        columnwise: FP8 [cols, rows], the transpose.
        columnwise_scale: float8_e8m0fnu [cols, ceil(rows / 32)].
    """

    rowwise: jax.Array | None
    rowwise_scale: jax.Array | None
    columnwise: jax.Array | None
    columnwise_scale: jax.Array | None


@checked
def mx_quantize(
    x: jax.Array,
    fp8_dtype: Any = jnp.float8_e4m3fn,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    rounding: str = "up",
    flatten_axis: int | None = None,
) -> MXQuantized:
    """Quantizes q = saturating_cast(float(x) / 2^e), with one e for each block of 32 elements.

    A block is 32 elements of a row of x for the rowwise copy, and 32 elements of a column of x for
    the columnwise copy; the last block may be shorter.

    Args:
        x: [rows, cols] float32, float16 or bfloat16.
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        rowwise, columnwise: the copies to make: [rows, cols], and its transpose [cols, rows].
        rounding: "up" takes the smallest 2^e that is at least amax / fp8_max, so that nothing
            saturates; "floor" (OCP MX v1.0) takes floor(log2 amax) minus 8 for E4M3 or minus 15 for
            E5M2 as e.
        flatten_axis: index of the first dimension that counts as columns, for x with more than two
            dimensions; None needs a matrix. The copies keep all dimensions; in the columnwise copy
            those of the columns come first.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match, ``rounding`` is not listed, or no copy is requested.
    """
    name = "mx_quantize"
    dtype = _checks.fp8_dtype_of(name, fp8_dtype)
    if rounding not in ("up", "floor"):
        raise ValueError(f"{name}: rounding must be 'up' or 'floor', got {rounding!r}")
    x, ranks = sides(name, x, flatten_axis)
    if not (rowwise or columnwise):
        raise ValueError(f"{name}: rowwise or columnwise must be asked for")
    made = run(
        name, name, {"x": x}, wanted(name, rowwise, columnwise), dtypes={"F": dtype}, ranks=ranks,
        use_floor=rounding == "floor",
    )  # fmt: skip
    return MXQuantized(*map(made.get, MXQuantized._fields))


@checked
def mx_dequantize(fp8_data: jax.Array, scale: jax.Array, *, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Multiplies MXFP8 data by its scales, exactly within the normal range of ``dtype``.

    Args:
        fp8_data: [rows, cols] FP8, a rowwise or a columnwise copy.
        scale: float8_e8m0fnu [rows, ceil(cols / 32)], of that copy.
        dtype: float32, float16 or bfloat16.

    Returns:
        [rows, cols] in ``dtype``; of a columnwise copy, the transpose of the quantized matrix.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match.
    """
    name = "mx_dequantize"
    given = {"fp8_data": fp8_data, "scale": scale}
    dtypes = {"T": _checks.float_dtype_of(name, "out", dtype).name}
    return run("mx_quantize", name, given, dtypes=dtypes)["out"]


def decoded(fp8_data: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """Returns the values of one device's shard of MXFP8 data [rows, cols] in ``dtype``."""
    given, dtypes = {"fp8_data": fp8_data, "scale": scale}, {"T": jnp.dtype(dtype).name}
    return local_call("mx_quantize", "mx_dequantize", given, (), dtypes)["out"]
