"""Casts a matrix to FP8 with one scale for each block of 1x128 or 128x128 elements, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...runtime.op_options import scales_number
from . import _checks
from ._checked import checked
from ._contract import run
from .fp8_output import sides, wanted

__all__ = [
    "BlockQuantized", "block_dequantize", "block_quantize", "scale_dims", "scale_shape",
    "scales_of_matrix", "unpadded", "with_padding",
]  # fmt: skip

_BLOCK = 128
_MULTIPLE = 4


class BlockQuantized(NamedTuple):
    """FP8 data and scale_inv of a matrix [rows, cols]; None for a copy that was not requested.

    Attributes:
        rowwise: FP8 [rows, cols].
        rowwise_scale_inv: float32 of shape ``scale_shape(rows, cols, block_rows)``.
        columnwise: FP8 [cols, rows], the transpose.
        columnwise_scale_inv: float32 of shape ``scale_shape(cols, rows, columnwise_block_rows)``.
    """

    rowwise: jax.Array | None
    rowwise_scale_inv: jax.Array | None
    columnwise: jax.Array | None
    columnwise_scale_inv: jax.Array | None


@checked
def scale_shape(rows: int, cols: int, block_rows: int) -> tuple[int, int]:
    """Returns the shape of the scale_inv tensor of FP8 data [rows, cols], as cuBLASLt reads it.

    With ``block_rows`` 1 (blocks of 1x128) it is (ceil(cols / 128), rows rounded up to a multiple
    of 4), as scales are stored transposed; with 128 (128x128), (ceil(rows / 128), ceil(cols / 128)
    rounded up to a multiple of 4).
    """
    blocks = -(-cols // _BLOCK)
    if block_rows == 1:
        return blocks, -(-rows // _MULTIPLE) * _MULTIPLE
    return -(-rows // _BLOCK), -(-blocks // _MULTIPLE) * _MULTIPLE


@checked
def block_quantize(
    x: jax.Array,
    fp8_dtype: Any,
    *,
    block_rows: int = 1,
    columnwise_block_rows: int | None = None,
    rowwise: bool = True,
    columnwise: bool = True,
    scales: str | None = None,
    pow2: bool | None = None,
    eps: float = 0.0,
    flatten_axis: int | None = None,
    padded: bool = True,
) -> BlockQuantized:
    """Quantizes q = saturating_cast(float(x) * scale), scale = fp8_max / amax of each block.

    Args:
        x: [rows, cols] float32, float16 or bfloat16.
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        block_rows: 1 (blocks of 1x128) or 128 (128x128).
        columnwise_block_rows: the same for the columnwise copy, ``block_rows`` or 128. None is
            ``block_rows``.
        rowwise, columnwise: the copies to make: [rows, cols], and its transpose [cols, rows].
        scales: "pow2" rounds scales down to powers of two, "fp32" does not, "server" divides by
            amax / fp8_max, as vLLM's casts do. None is "pow2".
        pow2: former form of ``scales``: True is "pow2", False "fp32".
        eps: smallest amax of a block; with "server" it is at least 1e-10.
        flatten_axis: index of the first dimension that counts as columns, for x with more than two
            dimensions; None needs a matrix. The copies keep all dimensions; in the columnwise copy
            those of the columns come first.
        padded: give scale_inv the shape ``scale_shape`` of the flattened matrix. If False, it is
            unpadded, keeps x's dimensions and stays sharded over devices; ``block_scaled_gemm``
            accepts both forms.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or option does not match, or no copy is requested.
        jax.errors.JaxRuntimeError: ``eps`` is negative; raised when the program runs.
    """
    name = "block_quantize"
    dtype = _checks.fp8_dtype_of(name, fp8_dtype)
    x, ranks = sides(name, x, flatten_axis)
    if block_rows not in (1, _BLOCK):
        raise ValueError(f"{name}: block_rows must be 1 or 128, got {block_rows}")
    of_columns = block_rows if columnwise_block_rows is None else columnwise_block_rows
    if of_columns not in (block_rows, _BLOCK):
        raise ValueError(
            f"{name}: columnwise_block_rows must be block_rows or 128, got {columnwise_block_rows}"
        )
    made = run(
        name, name, {"x": x}, wanted(name, rowwise, columnwise), dtypes={"F": dtype}, ranks=ranks,
        block_rows=block_rows, columnwise_block_rows=of_columns, eps=float(eps),
        scales=scales_number(name, scales, pow2),
    )  # fmt: skip
    if padded:
        rows, cols = math.prod(x.shape[: ranks["r"]]), math.prod(x.shape[ranks["r"] :])
        made = scales_of_matrix(made, rows, cols, (block_rows, of_columns))
    return BlockQuantized(*(made.get(each) for each in BlockQuantized._fields))


@checked
def scale_dims(rows: str, cols: str, block_rows: int) -> str:
    """Returns the dimensions of unpadded scale_inv in a rule, for FP8 data "rows cols"."""
    return f"{cols}/{_BLOCK} {rows}" if block_rows == 1 else f"{rows}/{_BLOCK} {cols}/{_BLOCK}"


@checked
def unpadded(scale_inv: jax.Array, shape: Sequence[int], block_rows: int) -> jax.Array:
    """Removes the padding that ``scale_shape`` adds from the ``scale_inv`` of FP8 data of a
    shape.
    """
    rows, cols = shape
    return scale_inv[:, : rows if block_rows == 1 else -(-cols // _BLOCK)]


@checked
def scales_of_matrix(
    made: Mapping[str, jax.Array], rows: int, cols: int, block_rows: tuple[int, int]
) -> dict[str, jax.Array]:
    """Returns ``made``, by field, with each unpadded scale_inv in the shape ``scale_shape``.

    ``block_rows`` is that of either copy.
    """
    found = dict(made)
    for name, shape, height in (
        ("rowwise_scale_inv", (rows, cols), block_rows[0]),
        ("columnwise_scale_inv", (cols, rows), block_rows[1]),
    ):
        if name in made:
            expected = scale_shape(*shape, height)
            unpadded_cols = shape[0] if height == 1 else -(-shape[1] // _BLOCK)
            found[name] = with_padding(made[name].reshape(expected[0], unpadded_cols))
    return found


@checked
def with_padding(scale_inv: jax.Array) -> jax.Array:
    """Returns unpadded scale_inv padded with ones to ``scale_shape``, as the C function does."""
    missing = -scale_inv.shape[1] % _MULTIPLE
    if not missing:
        return scale_inv
    return jnp.pad(scale_inv, ((0, 0), (0, missing)), constant_values=1.0)


@checked
def block_dequantize(
    fp8_data: jax.Array, scale_inv: jax.Array, out_dtype: Any, *, block_rows: int = 1
) -> jax.Array:
    """Multiplies FP8 data by the scale_inv of its blocks and rounds to nearest even.

    Args:
        fp8_data: [rows, cols] FP8, a rowwise or a columnwise copy.
        scale_inv: float32 of shape ``scale_shape(rows, cols, block_rows)``, of that copy.
        out_dtype: float32, float16 or bfloat16.
        block_rows: 1 or 128.

    Returns:
        [rows, cols] in ``out_dtype``; of a columnwise copy, the transpose of the quantized matrix.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match.
    """
    name = "block_dequantize"
    given = {"fp8_data": fp8_data, "scale_inv": scale_inv}
    dtypes = {"T": _checks.float_dtype_of(name, "out", out_dtype).name}
    return run("block_quantize", name, given, dtypes=dtypes, block_rows=block_rows)["out"]
