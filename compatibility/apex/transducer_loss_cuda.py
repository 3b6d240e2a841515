"""apex's transducer_loss_cuda: the loss of a transducer and its gradient, of log-probabilities."""

from __future__ import annotations

import torch

from apex_te._version import __version__ as __version__
from apex_te.ops.transducer_loss import transducer_loss_bwd, transducer_loss_fwd

__all__ = ["backward", "forward"]


@torch.no_grad()
def forward(
    x: torch.Tensor,
    label: torch.Tensor,
    f_len: torch.Tensor,
    y_len: torch.Tensor,
    batch_offset: torch.Tensor,
    max_f_len: int,
    blank_idx: int,
    opt: int,
    packed_input: bool,
) -> list[torch.Tensor]:
    """Computes [alpha, beta, loss] of log-probabilities.

    Args:
        x: log-probabilities [B, T, U, V] or packed [rows, V], float32, float16 or bfloat16.
        label: int32 [B, U - 1].
        f_len, y_len: frames and labels of each sample, int32 [B].
        batch_offset: cumsum(f_len * (y_len + 1)), int64 [B]; not read unless packed_input.
        max_f_len: T.
        blank_idx: index of the blank symbol.
        opt: not used; there is one kernel.
        packed_input: True for a packed x.

    Returns:
        [alpha, beta, loss]: float32 [B, T, U] twice, undefined behind the lengths, and [B] in the
        dtype of x.
    """
    offset = batch_offset if packed_input else None
    return list(transducer_loss_fwd(x, label, f_len, y_len, blank_idx, offset, max_f_len))


@torch.no_grad()
def backward(
    x: torch.Tensor,
    loss_grad: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    f_len: torch.Tensor,
    y_len: torch.Tensor,
    label: torch.Tensor,
    batch_offset: torch.Tensor,
    max_f_len: int,
    blank_idx: int,
    opt: int,
    fuse_softmax_backward: bool,
    packed_input: bool,
) -> torch.Tensor:
    """Computes the gradient of x, or with fuse_softmax_backward that of the logits behind it.

    The arguments are those and the results of ``forward``, and loss_grad, [B] in the dtype of x.
    """
    offset = batch_offset if packed_input else None
    return transducer_loss_bwd(
        x, loss_grad, alpha, beta, label, f_len, y_len, blank_idx, offset,
        fuse_softmax=fuse_softmax_backward,
    )  # fmt: skip
