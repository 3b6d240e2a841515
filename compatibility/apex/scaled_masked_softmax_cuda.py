"""apex's scaled_masked_softmax_cuda: softmax(scale * x) of attention scores under a mask."""

from apex_te._version import __version__ as __version__

from ._softmax import masked

__all__ = ["backward", "forward", "get_batch_per_block"]
forward, backward = masked(__name__)


def get_batch_per_block(query_seq_len: int, key_seq_len: int, batches: int, attn_heads: int) -> int:
    """Returns the rows that a block of apex's kernel takes, on a GPU whose warps have 32 threads.

    apex_te's kernel takes any shape. The number is that of apex's kernel, so that callers which
    choose a path by the number choose the same path as with apex.
    """
    row = 1 << max(key_seq_len - 1, 0).bit_length()
    return 128 // min(row, 32) * (2 if row <= 128 else 1)
