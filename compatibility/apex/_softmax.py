"""Checks and calls that apex's four softmax extensions share."""

from __future__ import annotations

import torch

from apex_te.ops.scaled_softmax import scaled_softmax_bwd, scaled_softmax_fwd


def forward(
    module: str,
    dims: int,
    input: torch.Tensor,
    mask: torch.Tensor | None,
    scale_factor: float,
    causal: str | None = None,
) -> torch.Tensor:
    """Computes softmax(scale_factor * input), where ``mask`` is 1 or ``causal`` hides zero."""
    _check_dims(module, "input", input, dims)
    if mask is not None:
        _check_dims(module, "mask", mask, dims)
        if mask.dtype is torch.uint8:
            mask = mask == 1
        elif mask.dtype is not torch.bool:
            raise TypeError(f"{module}: mask must be bool or uint8, got {mask.dtype}")
    # apex's callers pass the scale as a tensor of one element on the CPU.
    return scaled_softmax_fwd(input, float(scale_factor), mask, causal=causal)


def backward(
    module: str,
    dims: int,
    output_grads: torch.Tensor,
    softmax_results: torch.Tensor,
    scale_factor: float,
    causal: str | None = None,
) -> torch.Tensor:
    """Computes the input's gradient in a new tensor: another branch may still read output_grads."""
    _check_dims(module, "output_grads", output_grads, dims)
    _check_dims(module, "softmax_results", softmax_results, dims)
    return scaled_softmax_bwd(output_grads, softmax_results, float(scale_factor), causal=causal)


def _check_dims(module: str, name: str, tensor: torch.Tensor, dims: int) -> None:
    if tensor.dim() != dims:
        raise ValueError(
            f"{module}: {name} must have {dims} dimensions, got shape {list(tensor.shape)}"
        )
