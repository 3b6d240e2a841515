"""apex's scaled_softmax_cuda: softmax(scale * x) of attention scores, without a mask."""

from __future__ import annotations

import torch

from apex_te._version import __version__ as __version__

from . import _softmax

__all__ = ["backward", "forward"]
_MODULE = "scaled_softmax_cuda"


def forward(input: torch.Tensor, scale_factor: float) -> torch.Tensor:
    """softmax over the last dimension of input [b, heads, sq, sk]; float32, too."""
    return _softmax.forward(_MODULE, 4, input, None, scale_factor)


def backward(
    output_grads: torch.Tensor, softmax_results: torch.Tensor, scale_factor: float
) -> torch.Tensor:
    """The gradient of the input from that of the output and the output."""
    return _softmax.backward(_MODULE, 4, output_grads, softmax_results, scale_factor)
