"""The two functions of apex's four softmax extensions, made for each of them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from apex_te.ops.scaled_softmax import scaled_softmax_bwd, scaled_softmax_fwd

Functions = tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]


def unmasked(module: str, dims: int, causal: str | None = None) -> Functions:
    """Returns ``(forward, backward)`` of ``module``, whose tensors have ``dims`` dimensions."""

    def forward(input: torch.Tensor, scale_factor: float) -> torch.Tensor:
        """Computes softmax(scale_factor * input) over the last dimension.

        scaled_upper_triang_masked_softmax_cuda takes [b * heads, s, s] and gives 0 above the
        diagonal; scaled_softmax_cuda takes [b, heads, sq, sk]. float32 is taken, too.
        """
        _check_dims(module, "input", input, dims)
        # apex's callers pass the scale as a tensor of one element on the CPU.
        return scaled_softmax_fwd(input, float(scale_factor), causal=causal)

    return _named(forward, module), _backward(module, dims, causal)


def masked(module: str) -> Functions:
    """Returns ``(forward, backward)`` of ``module``, whose forward takes a mask."""

    def forward(
        input: torch.Tensor, mask: torch.Tensor | None, scale_factor: float
    ) -> torch.Tensor:
        """Computes softmax over the last dimension of input [b, heads, sq, sk] where mask is not 1.

        ``mask``: [b or 1, 1, sq, sk], bool or uint8, 1 = masked out. A row that is masked out
        altogether gives zeros.
        """
        _check_dims(module, "input", input, 4)
        if mask is not None:
            _check_dims(module, "mask", mask, 4)
            if mask.dtype is torch.uint8:
                mask = mask == 1
            elif mask.dtype is not torch.bool:
                raise TypeError(f"{_short(module)}: mask must be bool or uint8, got {mask.dtype}")
        return scaled_softmax_fwd(input, float(scale_factor), mask)

    return _named(forward, module), _backward(module, 4)


def _backward(module: str, dims: int, causal: str | None = None) -> Callable[..., torch.Tensor]:
    def backward(
        output_grads: torch.Tensor, softmax_results: torch.Tensor, scale_factor: float
    ) -> torch.Tensor:
        """Computes the input's gradient from that of the output and the output.

        The result is a new tensor: another branch may still read output_grads.
        """
        _check_dims(module, "output_grads", output_grads, dims)
        _check_dims(module, "softmax_results", softmax_results, dims)
        return scaled_softmax_bwd(output_grads, softmax_results, float(scale_factor), causal=causal)

    return _named(backward, module)


def _named(function: Callable[..., torch.Tensor], module: str) -> Callable[..., torch.Tensor]:
    """Returns the function as one that ``module`` defines, which ``pickle`` finds there."""
    function.__module__, function.__qualname__ = module, function.__name__
    return function


def _short(module: str) -> str:
    return module.rpartition(".")[2]


def _check_dims(module: str, name: str, tensor: torch.Tensor, dims: int) -> None:
    if tensor.dim() != dims:
        raise ValueError(
            f"{_short(module)}: {name} must have {dims} dimensions, got shape {list(tensor.shape)}"
        )
