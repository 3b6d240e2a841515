"""Gated activations and their gradients, cast to FP8 with one scale for each block of 1x128."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ...runtime.op_options import ClampedSwiglu, block_scales, scales_number
from . import _checks
from ._checked import checked
from ._gated_arrays import GatedArrays, call_gated, gated_arrays
from .block_quantize import BlockQuantized, block_quantize, scales_of_matrix
from .fp8_output import wanted

__all__ = ["swiglu_bwd_block", "swiglu_fwd_block"]

_BLOCK = 128


@checked
def swiglu_fwd_block(
    input: jax.Array,
    up: jax.Array | None,
    fp8_dtype: Any,
    *,
    bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    activation: str | ClampedSwiglu = "silu",
    axis: int = -1,
    columnwise_block_rows: int = 1,
    rowwise: bool = True,
    columnwise: bool = True,
    scales: str | None = None,
    pow2: bool | None = None,
    eps: float = 0.0,
    padded: bool = True,
) -> BlockQuantized:
    """Computes ``swiglu`` and casts its result [M, F] with ``block_quantize`` in one kernel.

    The result is bitwise that of the two ops, which round the intermediate result to the input's
    dtype. For float32 input the two ops run. Rows may be sharded over devices, and F, too, unless
    gate and up are concatenated to [..., 2F].

    Args:
        input: float32, float16 or bfloat16: gate and up concatenated, gate first, [..., 2F]; with
            ``up`` the gate alone, [..., F]; with ``axis`` -2 both as [..., 2, F].
        up: [..., F] in the input's dtype, or None; must be None with ``axis`` -2.
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        bias, up_bias, activation, axis: as in ``swiglu``.
        columnwise_block_rows: 1 or 128, rows of a block of the columnwise copy; rowwise blocks are
            1x128.
        rowwise, columnwise: the copies to make: [M, F], and its transpose [F, M]; M is the product
            of the leading dimensions. With ``axis`` -2 they are [..., F] and [F, ...].
        scales: "pow2" rounds scales down to powers of two, "fp32" does not, "server" divides by
            amax / fp8_max, as vLLM's casts do. None is "pow2".
        pow2: former form of ``scales``: True is "pow2", False "fp32".
        eps: smallest amax of a block.
        padded: give scale_inv the shape ``block_quantize.scale_shape``, else leave it unpadded, as
            in ``block_quantize``.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or option does not match, or no copy is requested.
    """
    name = "swiglu_fwd_block"
    given = gated_arrays(name, activation, axis, input, up, bias, up_bias, to_fp8=True)
    rule = block_scales(name, scales, pow2)
    if columnwise_block_rows not in (1, _BLOCK):
        raise ValueError(
            f"{name}: columnwise_block_rows must be 1 or 128, got {columnwise_block_rows}"
        )
    options: dict[str, Any] = {"rowwise": rowwise, "columnwise": columnwise, "scales": rule,
                               "columnwise_block_rows": columnwise_block_rows,
                               "eps": eps}  # fmt: skip
    if given.dtype != jnp.float32:
        return _run(given, "r f", fp8_dtype, padded, **options)
    _checks.fp8_dtype_of(name, fp8_dtype)
    wanted(name, rowwise, columnwise)
    values = call_gated(given._replace(function="swiglu_fwd"), {"out": "r f"})["out"]
    return block_quantize(values, fp8_dtype, flatten_axis=-1, padded=padded, **options)


@checked
def swiglu_bwd_block(
    grad_output: jax.Array,
    input: jax.Array,
    up: jax.Array | None,
    fp8_dtype: Any,
    *,
    bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    activation: str | ClampedSwiglu = "silu",
    axis: int = -1,
    rowwise: bool = True,
    columnwise: bool = True,
    scales: str | None = None,
    pow2: bool | None = None,
    eps: float = 0.0,
    padded: bool = True,
) -> BlockQuantized:
    """Computes ``swiglu_bwd`` and casts its gradients, one matrix [M, 2F], by ``block_quantize``.

    One kernel does both, bitwise equal to the two ops, which run for float32 input and if F is not
    a multiple of 128. The matrix has the gate's gradient first, even if gate and up are two arrays.

    Args:
        grad_output: [..., F], gradient of the output, in the input's dtype.
        input: float32, float16 or bfloat16: gate and up concatenated, gate first, [..., 2F]; with
            ``up`` the gate alone, [..., F]; with ``axis`` -2 both as [..., 2, F].
        up: [..., F] in the input's dtype, or None; must be None with ``axis`` -2.
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        bias, up_bias, activation, axis: as passed to ``swiglu``.
        rowwise, columnwise: the copies to make: [M, 2F], and its transpose [2F, M]. With ``axis``
            -2 they are [..., 2, F] and [2, F, ...].
        scales: "pow2" rounds scales down to powers of two, "fp32" does not, "server" divides by
            amax / fp8_max, as vLLM's casts do. None is "pow2".
        pow2: former form of ``scales``: True is "pow2", False "fp32".
        eps: smallest amax of a block.
        padded: give scale_inv the shape ``block_quantize.scale_shape``, else leave it unpadded, as
            in ``block_quantize``.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or option does not match, or no copy is requested.
    """
    name = "swiglu_bwd_block"
    given = gated_arrays(name, activation, axis, input, up, bias, up_bias, grad_output, to_fp8=True)
    rule = block_scales(name, scales, pow2)
    options: dict[str, Any] = {"rowwise": rowwise, "columnwise": columnwise, "scales": rule,
                               "eps": eps}  # fmt: skip
    if given.dtype != jnp.float32 and given.shape[-1] % _BLOCK == 0:
        return _run(given, "r g f" if axis == -2 else "r c", fp8_dtype, padded, **options)
    _checks.fp8_dtype_of(name, fp8_dtype)
    wanted(name, rowwise, columnwise)
    results = {"grad_input": given.dims["input"]} | ({} if up is None else {"grad_up": "r f"})
    made = call_gated(given._replace(function="swiglu_bwd"), results)
    values = jnp.concatenate(list(made.values()), -1) if up is not None else made["grad_input"]
    return block_quantize(values, fp8_dtype, flatten_axis=axis, padded=padded, **options)


def _run(
    given: GatedArrays, dims: str, fp8_dtype: Any, padded: bool, *, rowwise: bool,
    columnwise: bool, scales: str, eps: float, columnwise_block_rows: int | None = None,
) -> BlockQuantized:  # fmt: skip
    """Calls the C function, whose result as a matrix has the dimensions ``dims`` in a rule."""
    dtype = _checks.fp8_dtype_of(given.function, fp8_dtype)
    lines, *columns = dims.split()
    blocks = {
        "rowwise": [*columns[:-1], f"{columns[-1]}/{_BLOCK}", lines],
        "columnwise": [f"{lines}/{_BLOCK}", *columns],
    }
    if columnwise_block_rows == _BLOCK:
        blocks["columnwise"] = [*columns[:-1], f"{columns[-1]}/{_BLOCK}", f"{lines}/{_BLOCK}"]
    copies = {"rowwise": dims, "columnwise": " ".join([*columns, lines])}
    results: dict[str, str] = {}
    for side in wanted(given.function, rowwise, columnwise):
        results |= {side: copies[side], f"{side}_scale_inv": " ".join(blocks[side])}
    number = scales_number(given.function, scales, None)
    attributes: dict[str, Any] = {"scales": number, "eps": float(eps)}
    if columnwise_block_rows is not None:  # of forward
        attributes["columnwise_block_rows"] = columnwise_block_rows
    made = call_gated(given, results, None, dtype, "swiglu_block", **attributes)
    if padded:
        rows = math.prod(given.arrays["input"].shape[: given.options["ranks"]["r"]])
        cols = given.shape[-1] if columns == ["f"] else 2 * given.shape[-1]
        made = scales_of_matrix(made, rows, cols, (1, columnwise_block_rows or 1))
    return BlockQuantized(*(made.get(each) for each in BlockQuantized._fields))
