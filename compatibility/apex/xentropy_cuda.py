"""apex's xentropy_cuda: softmax cross entropy with label smoothing, one loss for each row."""

from __future__ import annotations

import torch

from apex_te._version import __version__ as __version__
from apex_te.ops.cross_entropy import cross_entropy_bwd, cross_entropy_fwd

__all__ = ["backward", "forward"]


@torch.no_grad()
def forward(
    input: torch.Tensor, labels: torch.Tensor, smoothing: float, half_to_float: bool
) -> list[torch.Tensor]:
    """Computes the cross entropy of each row.

    Args:
        input: logits [rows, classes], float32, float16 or bfloat16.
        labels: [rows] int64 or int32; -100 gives loss and gradient 0, another label outside the
            classes raises on the CPU and gives NaN on the GPU.
        smoothing: share of the target's probability spread over all classes.
        half_to_float: with float16 or bfloat16 input, keep max_log_sum_exp in float32.

    Returns:
        [losses, max_log_sum_exp], both [rows]. The losses are float32. max_log_sum_exp is
        log(sum(exp(input))) in the input's dtype or float32, computed from the losses: NaN where
        the label is ignored or its logit is not finite. ``backward`` does not read it.
    """
    _check("forward", input, labels)
    if half_to_float and input.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(
            "xentropy_cuda.forward: half_to_float needs float16 or bfloat16 input, "
            f"got {input.dtype}"
        )
    input, labels, smoothing = input.contiguous(), labels.contiguous(), float(smoothing)
    losses = cross_entropy_fwd(input, labels, label_smoothing=smoothing)
    is_class = (labels >= 0) & (labels < input.shape[1])
    index = labels.masked_fill(~is_class, 0).long().unsqueeze(1)
    # loss = log_sum_exp - (1 - smoothing) * input[label] - smoothing * mean(input)
    log_sum_exp = losses + (1 - smoothing) * input.gather(1, index).squeeze(1).float()
    if smoothing:
        log_sum_exp += smoothing * input.mean(1, dtype=torch.float32)
    log_sum_exp = log_sum_exp.masked_fill(~is_class, torch.nan)
    return [losses, log_sum_exp if half_to_float else log_sum_exp.to(input.dtype)]


@torch.no_grad()
def backward(
    grad_loss: torch.Tensor,
    logits: torch.Tensor,
    max_log_sum_exp: torch.Tensor,
    labels: torch.Tensor,
    smoothing: float,
) -> torch.Tensor:
    """Computes the gradient of the logits, in their dtype, from that of the losses.

    Args:
        grad_loss: [rows].
        logits, labels, smoothing: as in ``forward``.
        max_log_sum_exp: not read.
    """
    _check("backward", logits, labels)
    if grad_loss.shape != labels.shape:
        raise ValueError(
            f"xentropy_cuda.backward: grad_loss must have shape {list(labels.shape)}, "
            f"got {list(grad_loss.shape)}"
        )
    logits = logits.contiguous()
    labels, smoothing = labels.contiguous(), float(smoothing)
    # Not from max_log_sum_exp, which may be of 16 bits.
    stats = logits.new_empty(len(logits), 2, dtype=torch.float32)
    cross_entropy_fwd(logits, labels, stats=stats, label_smoothing=smoothing)
    factor = grad_loss.float().contiguous()
    grad = torch.empty_like(logits)
    return cross_entropy_bwd(logits, labels, stats, factor, grad, label_smoothing=smoothing)


def _check(op: str, logits: torch.Tensor, labels: torch.Tensor) -> None:
    """Checks that logits are [rows, classes] and labels [rows]; raises ``ValueError``."""
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"xentropy_cuda.{op}: logits must have shape [rows, classes] and labels [rows], "
            f"got {list(logits.shape)} and {list(labels.shape)}"
        )
