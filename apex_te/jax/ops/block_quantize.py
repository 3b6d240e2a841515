"""Casts a matrix to FP8 with one scale for each block of 1x128 or 128x128 elements, and back."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._call import call
from . import _checks

__all__ = ["BlockQuantized", "block_dequantize", "block_quantize", "scale_shape"]

_S = jax.ShapeDtypeStruct
_BLOCK = 128
_MULTIPLE = 4


class BlockQuantized(NamedTuple):
    """FP8 data of a matrix [rows, cols] with its scales; None for what was not asked for.

    Attributes:
        rowwise: FP8 [rows, cols].
        rowwise_scale_inv: float32 of shape scale_shape(rows, cols, block_rows).
        columnwise: FP8 [cols, rows].
        columnwise_scale_inv: float32 of shape scale_shape(cols, rows, block_rows).
    """

    rowwise: jax.Array | None
    rowwise_scale_inv: jax.Array | None
    columnwise: jax.Array | None
    columnwise_scale_inv: jax.Array | None


def scale_shape(rows: int, cols: int, block_rows: int) -> tuple[int, int]:
    """Returns the shape of the scale_inv tensor of FP8 data [rows, cols], as cuBLASLt reads it.

    Args:
        rows: rows of the copy, rowwise or columnwise.
        cols: columns of the copy, the inner dimension K of a product.
        block_rows: 1 (blocks of 1x128) or 128 (128x128).

    Returns:
        For 1x128 (ceil(cols / 128), rows rounded up to a multiple of 4), which is the transposed
        order; for 128x128 (ceil(rows / 128), ceil(cols / 128) rounded up to a multiple of 4).
    """
    blocks = -(-cols // _BLOCK)
    if block_rows == 1:
        return blocks, -(-rows // _MULTIPLE) * _MULTIPLE
    return -(-rows // _BLOCK), -(-blocks // _MULTIPLE) * _MULTIPLE


def block_quantize(
    x: jax.Array,
    fp8_dtype: Any,
    *,
    block_rows: int = 1,
    rowwise: bool = True,
    columnwise: bool = True,
    pow2: bool = True,
    eps: float = 0.0,
) -> BlockQuantized:
    """Quantizes q = saturating_cast(float(x) * scale), scale = fp8_max / amax of each block.

    With 1x128 blocks the blocks of the columnwise copy are 128 elements of a column of x, with
    scales of their own; with 128x128 blocks it is the transposed rowwise copy.

    Args:
        x: [rows, cols] float32, float16 or bfloat16.
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        block_rows: 1 (blocks of 1x128) or 128 (128x128).
        rowwise: make [rows, cols] and its scale_inv.
        columnwise: make [cols, rows] and its scale_inv.
        pow2: round scales down to powers of two.
        eps: smallest amax.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: a shape, block_rows or eps that does not fit, or neither copy asked for.
    """
    name = "block_quantize"
    dtype = jnp.dtype(_checks.fp8_dtype_of(name, fp8_dtype))
    x = _checks.matrix(name, "x", x)
    if block_rows not in (1, _BLOCK):
        raise ValueError(f"{name}: block_rows must be 1 or 128, got {block_rows}")
    if not (rowwise or columnwise):
        raise ValueError(f"{name}: rowwise or columnwise must be True, got False for both")
    rows, cols = x.shape
    results = {}
    for side, shape, wanted in (
        ("rowwise", (rows, cols), rowwise),
        ("columnwise", (cols, rows), columnwise),
    ):
        if wanted:
            results[side] = _S(shape, dtype)
            results[f"{side}_scale_inv"] = _S(scale_shape(*shape, block_rows), jnp.float32)
    options = {"block_rows": block_rows, "eps": float(eps), "pow2": bool(pow2)}
    made = call(name, name, results, x=x, **options)
    return BlockQuantized(*(made.get(each) for each in BlockQuantized._fields))


def block_dequantize(
    fp8_data: jax.Array, scale_inv: jax.Array, out_dtype: Any, *, block_rows: int = 1
) -> jax.Array:
    """Returns the values of FP8 data [rows, cols] in float32, float16 or bfloat16.

    Args:
        fp8_data: a copy that ``block_quantize`` has made, with ``scale_inv``.
        scale_inv: its scales.
        out_dtype: dtype of the result.
        block_rows: as in ``block_quantize``.
    """
    name = "block_dequantize"
    fp8_data = _checks.matrix(name, "fp8_data", fp8_data, _checks.FP8)
    results = {"out": _S(fp8_data.shape, jnp.dtype(out_dtype))}
    given = {"fp8_data": fp8_data, "scale_inv": jnp.asarray(scale_inv)}
    return call("block_quantize", name, results, **given, block_rows=block_rows)["out"]
