"""Matrices of gate, up and gradient, as the kernels of gated activations read them."""

from __future__ import annotations

import math

import torch


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
