"""apex's scaled_upper_triang_masked_softmax_cuda: causal softmax(scale * x) of attention scores."""

from __future__ import annotations

import torch

from apex_te._version import __version__ as __version__

from . import _softmax

__all__ = ["backward", "forward"]
_MODULE = "scaled_upper_triang_masked_softmax_cuda"


def forward(input: torch.Tensor, scale_factor: float) -> torch.Tensor:
    """Causal softmax over the last dimension of input [b * heads, s, s]; 0 above the diagonal."""
    return _softmax.forward(_MODULE, 3, input, None, scale_factor, "upper_left")


def backward(
    output_grads: torch.Tensor, softmax_results: torch.Tensor, scale_factor: float
) -> torch.Tensor:
    """The gradient of the input from that of the output and the output."""
    return _softmax.backward(_MODULE, 3, output_grads, softmax_results, scale_factor, "upper_left")
