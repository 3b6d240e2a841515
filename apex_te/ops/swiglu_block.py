"""Gated activations and their gradients, cast to FP8 with one scale for each block of 1x128."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..runtime.op_options import BLOCK_SCALES, ClampedSwiglu, gate_arguments, scales_number
from . import swiglu
from ._gated_matrices import (
    dense_biases,
    held_input,
    input_matrices,
    output_gradient,
    result_extents,
)
from .binding import bind, checked, note_written, under_name
from .block_quantize import BlockQuantized, allocate, block_quantize, scale_shape
from .fp8_output import check_any_output, check_fp8_dtype

_fwd = bind("swiglu_block", "swiglu_fwd_block")
_bwd = bind("swiglu_block", "swiglu_bwd_block")
_fwd_held = bind("swiglu_block", "swiglu_fwd_held_block")
_bwd_held = bind("swiglu_block", "swiglu_bwd_held_block")

_BLOCK = 128
_SERVER = BLOCK_SCALES.index("server")


@checked
def swiglu_fwd_block(
    input: torch.Tensor,
    up: torch.Tensor | None,
    fp8_dtype: torch.dtype,
    *,
    input_scale_inv: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    activation: str | ClampedSwiglu = "silu",
    columnwise_block_rows: int = 1,
    rowwise: bool = True,
    columnwise: bool = True,
    pad_columnwise: bool = False,
    scales: str | None = None,
    pow2: bool | None = None,
    eps: float = 0.0,
    amax: torch.Tensor | None = None,
) -> BlockQuantized:
    """Computes ``swiglu`` and casts its result [M, F] with ``block_quantize`` in one kernel.

    Results equal those of the two ops bitwise, including the rounding of ``swiglu``'s result to the
    input's dtype, but that result is not written to memory. Exception: for float32 the two ops run.

    Args:
        input: float32, float16 or bfloat16, the gate [..., F], or without ``up`` gate and up [...,
            2F]. M is the product of all its dimensions but the last.
        up: [..., F] in the input's dtype, or None.
        input_scale_inv: scale_inv of an E4M3 ``input``, as ``block_quantize`` returns it for 1x128
            blocks. ``input`` must then be [M, 2F], without biases. Results equal those for the
            dequantized bfloat16 values. None if ``input`` is not in FP8.
        bias, up_bias, activation: as in ``swiglu.swiglu``.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        columnwise_block_rows, rowwise, columnwise, pad_columnwise, scales, pow2, eps, amax: as in
            ``block_quantize``.

    Returns:
        The requested copies, rowwise [M, F] and columnwise [F, M], with their scale_inv.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match, or an option is not supported.
    """
    gate = gate_arguments("swiglu_fwd_block", activation)
    number = scales_number("swiglu_fwd_block", scales, pow2)
    check_fp8_dtype("swiglu_fwd_block", fp8_dtype)
    check_any_output("swiglu_fwd_block", rowwise, columnwise, amax)
    held = None
    if input_scale_inv is not None:
        input, held = held_input(
            "swiglu_fwd_block", input, input_scale_inv, up, bias, swiglu.HELD_MULTIPLE,
            number != _SERVER,
        )  # fmt: skip
    matrix, up_matrix = input_matrices("swiglu_fwd_block", input, up)
    rows, cols = result_extents(matrix, up_matrix)
    biases = dense_biases(bias, up_bias)
    if matrix.dtype is torch.float32:
        return _by_two_ops(
            "swiglu_fwd_block",
            lambda: swiglu.swiglu_fwd(matrix, up_matrix, bias, up_bias, activation=activation),
            fp8_dtype, columnwise_block_rows=columnwise_block_rows, rowwise=rowwise,
            columnwise=columnwise, pad_columnwise=pad_columnwise, scales=scales, pow2=pow2,
            eps=eps, amax=amax,
        )  # fmt: skip
    blocks = 1, columnwise_block_rows
    out = allocate(matrix, rows, cols, fp8_dtype, blocks, rowwise, columnwise, pad_columnwise)
    rest = amax, columnwise_block_rows, eps, number
    if held is not None:
        _fwd_held(matrix, held, *out, *rest, *gate)
    else:
        _fwd(matrix, up_matrix, *biases, *out, *rest, *gate)
    note_written(amax)
    return out.of_rows(rows)


@checked
def swiglu_bwd_block(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    up: torch.Tensor | None,
    fp8_dtype: torch.dtype,
    *,
    input_scale_inv: torch.Tensor | None = None,
    overwrite_input: bool = False,
    bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    activation: str | ClampedSwiglu = "silu",
    rowwise: bool = True,
    columnwise: bool = True,
    pad_columnwise: bool = False,
    scales: str | None = None,
    pow2: bool | None = None,
    eps: float = 0.0,
    amax: torch.Tensor | None = None,
) -> BlockQuantized:
    """Computes ``swiglu_bwd`` and casts its gradients, one matrix [M, 2F], by ``block_quantize``.

    One kernel computes this. Exception: for float32, and if F is not a multiple of 128, the two ops
    run. Results equal those of the two ops bitwise, including the rounding of ``swiglu_bwd``'s
    results to the input's dtype.

    Args:
        grad_output: [..., F], gradient of the output, in the input's dtype.
        input: float32, float16 or bfloat16, the gate [..., F], or without ``up`` gate and up [...,
            2F]. M is the product of all its dimensions but the last.
        up: [..., F] in the input's dtype, or None.
        input_scale_inv: scale_inv of an E4M3 ``input``, as ``block_quantize`` returns it for 1x128
            blocks. ``input`` must then be [M, 2F], without biases. Results equal those for the
            dequantized bfloat16 values. None if ``input`` is not in FP8.
        overwrite_input: allow the rowwise copy to reuse the memory of an ``input`` given with
            ``input_scale_inv``, which is then lost. Ops that cannot do so allocate new memory.
        bias, up_bias, activation: as in ``swiglu.swiglu``.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise, columnwise, pad_columnwise, scales, pow2, eps, amax: as in ``block_quantize``.

    Returns:
        The requested copies, rowwise [M, 2F] and columnwise [2F, M], with their scale_inv. The
        matrix has the gate's gradient first, even if gate and up are two tensors.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match, or an option is not supported.
    """
    gate = gate_arguments("swiglu_bwd_block", activation)
    number = scales_number("swiglu_bwd_block", scales, pow2)
    check_fp8_dtype("swiglu_bwd_block", fp8_dtype)
    check_any_output("swiglu_bwd_block", rowwise, columnwise, amax)
    held = None
    if input_scale_inv is not None:
        input, held = held_input(
            "swiglu_bwd_block", input, input_scale_inv, up, bias, _BLOCK, number != _SERVER
        )
    matrix, up_matrix = input_matrices("swiglu_bwd_block", input, up)
    rows, cols = result_extents(matrix, up_matrix)
    biases = dense_biases(bias, up_bias)
    grad_matrix = output_gradient("swiglu_bwd_block", grad_output, input, cols)
    if matrix.dtype is torch.float32 or cols % _BLOCK:

        def joined() -> torch.Tensor:
            grads = swiglu.swiglu_bwd(
                grad_matrix, matrix, up_matrix, bias, up_bias, activation=activation
            )
            return grads.input if grads.up is None else torch.cat([grads.input, grads.up], dim=1)

        return _by_two_ops(
            "swiglu_bwd_block", joined, fp8_dtype, rowwise=rowwise, columnwise=columnwise,
            pad_columnwise=pad_columnwise, scales=scales, pow2=pow2, eps=eps, amax=amax,
        )  # fmt: skip
    overwrites = overwrite_input and rowwise and held is not None
    makes = rowwise and not overwrites
    out = allocate(matrix, rows, 2 * cols, fp8_dtype, (1, 1), makes, columnwise, pad_columnwise)
    if overwrites:
        row_scales = matrix.new_empty(scale_shape(rows, 2 * cols, 1), dtype=torch.float32)
        out = out._replace(rowwise=matrix.view(fp8_dtype), rowwise_scale_inv=row_scales)
    if held is not None:
        _bwd_held(grad_matrix, matrix, held, *out, amax, eps, number, *gate)
    else:
        _bwd(grad_matrix, matrix, up_matrix, *biases, *out, amax, eps, number, *gate)
    note_written(amax, matrix if overwrites else None)
    return out.of_rows(rows)


def _by_two_ops(
    op: str, compute: Callable[[], torch.Tensor], fp8_dtype: torch.dtype, **options: Any
) -> BlockQuantized:
    """Casts a matrix that another op computes, where the kernel that does both does not serve."""
    try:
        return block_quantize(compute(), fp8_dtype, **options)
    except (TypeError, ValueError) as error:
        raise under_name(op, error) from error
