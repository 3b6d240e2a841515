"""apex's generic_scaled_masked_softmax_cuda: scaled masked softmax of any key length."""

from __future__ import annotations

import torch

from apex_te._version import __version__ as __version__

from . import _softmax

__all__ = ["backward", "forward"]
_MODULE = "generic_scaled_masked_softmax_cuda"


def forward(input: torch.Tensor, mask: torch.Tensor, scale_factor: float) -> torch.Tensor:
    """softmax over the last dimension of input [b, heads, sq, sk] where mask is not 1.

    ``mask``: [b or 1, 1, sq, sk], bool or uint8, 1 = masked out. A row that is masked out
    altogether gives zeros.
    """
    return _softmax.forward(_MODULE, 4, input, mask, scale_factor)


def backward(
    output_grads: torch.Tensor, softmax_results: torch.Tensor, scale_factor: float
) -> torch.Tensor:
    """The gradient of the input from that of the output and the output."""
    return _softmax.backward(_MODULE, 4, output_grads, softmax_results, scale_factor)
