"""apex's focal_loss_cuda: the sigmoid focal loss of a detector's logits, and its gradient."""

from __future__ import annotations

import torch

from apex_te._version import __version__ as __version__
from apex_te.ops.focal_loss import focal_loss_fwd, focal_loss_scale

__all__ = ["backward", "forward"]


@torch.no_grad()
def forward(
    cls_output: torch.Tensor,
    cls_targets_at_level: torch.Tensor,
    num_positives_sum: torch.Tensor,
    num_real_classes: int,
    alpha: float,
    gamma: float,
    smoothing_factor: float,
) -> list[torch.Tensor]:
    """Computes the loss and the gradient of its sum, without the division by num_positives_sum.

    Args:
        cls_output: logits [..., C], float32, float16 or bfloat16.
        cls_targets_at_level: [...] int64; -2 is ignored, -1 has only background.
        num_positives_sum: divides the loss, one float32 element.
        num_real_classes: columns from it on are padding.
        alpha: weight of the target's class; the others have 1 - alpha.
        gamma: exponent.
        smoothing_factor: label smoothing, 0 to 1.

    Returns:
        [loss, float32 [], partial_grad like cls_output].
    """
    loss, partial_grad = focal_loss_fwd(
        cls_output, cls_targets_at_level, num_positives_sum, num_real_classes, alpha, gamma,
        smoothing_factor,
    )  # fmt: skip
    assert partial_grad is not None
    return [loss, partial_grad]


@torch.no_grad()
def backward(
    grad_output: torch.Tensor, partial_grad: torch.Tensor, num_positives_sum: torch.Tensor
) -> torch.Tensor:
    """Multiplies partial_grad in place by grad_output / num_positives_sum and returns it."""
    return focal_loss_scale(partial_grad, grad_output, num_positives_sum)
