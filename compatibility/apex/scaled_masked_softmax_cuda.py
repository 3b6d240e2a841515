"""apex's scaled_masked_softmax_cuda: softmax(scale * x) of attention scores under a mask."""

from __future__ import annotations

import torch

from apex_te._version import __version__ as __version__

from . import _softmax

__all__ = ["backward", "forward", "get_batch_per_block"]
_MODULE = "scaled_masked_softmax_cuda"


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


def get_batch_per_block(query_seq_len: int, key_seq_len: int, batches: int, attn_heads: int) -> int:
    """Rows that a block of apex's kernel takes, on a GPU whose warps have 32 threads.

    The suite's kernel takes any shape; the number is apex's, so that a caller who decides by it
    decides as with apex.
    """
    row = 1 << max(key_seq_len - 1, 0).bit_length()
    return 128 // min(row, 32) * (2 if row <= 128 else 1)
