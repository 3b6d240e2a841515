"""Matrices of gate, up and gradient, as the kernels of gated activations read them."""

from __future__ import annotations

import math

import torch

from .block_quantize import block_dequantize


def held_input(
    op: str,
    input: torch.Tensor,
    scale_inv: torch.Tensor,
    up: torch.Tensor | None,
    bias: torch.Tensor | None,
    multiple: int,
    may_read: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns a held input [M, 2F] and its scales; or its values and None.

    Kernels read a held input if F is a multiple of ``multiple`` and with ``may_read``. Raises
    ValueError if there is ``up`` or a bias, and TypeError unless the input is in E4M3.
    """
    for name, value in (("up", up), ("bias", bias)):
        if value is not None:
            raise ValueError(f"{op}: {name} must be None with input_scale_inv, got a tensor")
    if input.dtype is not torch.float8_e4m3fn:
        raise TypeError(
            f"{op}: input must be torch.float8_e4m3fn with input_scale_inv, got {input.dtype}"
        )
    matrix = input_matrices(op, input, None)[0].contiguous()
    if not may_read or matrix.shape[1] % (2 * multiple):
        return block_dequantize(matrix, scale_inv), None
    return matrix, scale_inv


def input_matrices(
    op: str, input: torch.Tensor, up: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the inputs as matrices [M, F or 2F]; copies one whose rows are not contiguous.

    Raises ValueError if ``input`` has no dimension, or ``up`` not its shape.
    """
    if input.dim() == 0:
        raise ValueError(f"{op}: input must have at least 1 dimension, got shape []")
    if up is not None and up.shape != input.shape:
        raise ValueError(
            f"{op}: up must have the shape of input, {list(input.shape)}, got {list(up.shape)}"
        )
    return _matrix(input), None if up is None else _matrix(up)


def _matrix(x: torch.Tensor) -> torch.Tensor:
    matrix = x if x.dim() == 2 else x.detach().reshape(math.prod(x.shape[:-1]), x.shape[-1])
    # Dynamo does not know the strides of what a backward makes; graphs drop copies that change
    # nothing.
    if torch.compiler.is_compiling() or matrix.stride(1) != 1:
        return matrix.contiguous()
    return matrix


def dense_biases(
    bias: torch.Tensor | None, up_bias: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns both biases, each copied if it is not contiguous; None for a bias not given."""
    return (
        None if bias is None else bias.contiguous(),
        None if up_bias is None else up_bias.contiguous(),
    )


def result_extents(matrix: torch.Tensor, up_matrix: torch.Tensor | None) -> tuple[int, int]:
    """Returns (M, F), the shape of the result; the matrix is [M, F], or [M, 2F] without up."""
    rows, cols = matrix.shape
    return rows, cols // 2 if up_matrix is None else cols


def output_gradient(
    op: str, grad_output: torch.Tensor, input: torch.Tensor, cols: int
) -> torch.Tensor:
    """Returns the output's gradient as a contiguous matrix [M, cols].

    Raises ValueError unless it has the shape of ``input`` with ``cols`` = F columns.
    """
    expected = (*input.shape[:-1], cols)
    if grad_output.shape != expected:
        raise ValueError(
            f"{op}: grad_output must have shape {list(expected)}, got {list(grad_output.shape)}"
        )
    return grad_output.reshape(math.prod(expected[:-1]), cols).contiguous()


def in_halves(x: torch.Tensor) -> torch.Tensor:
    """Returns interleaved columns [..., 2F] with the even ones first, then the odd ones."""
    return torch.cat((x[..., ::2], x[..., 1::2]), -1)


def interleaved(x: torch.Tensor) -> torch.Tensor:
    """Returns the columns whose ``in_halves`` are ``x``."""
    return torch.stack(x.chunk(2, -1), -1).flatten(-2)
