"""Sigmoid focal loss of a detector's logits, with the op ``focal_loss``."""

from __future__ import annotations

import torch

from .....ops.focal_loss import FocalLossFunction as FocalLoss

__all__ = ["FocalLoss", "focal_loss"]


def focal_loss(
    cls_output: torch.Tensor,
    cls_targets_at_level: torch.Tensor,
    num_positive_sum: torch.Tensor,
    num_real_classes: int,
    alpha: float,
    gamma: float,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Computes the sigmoid focal loss of one level of a detector; differentiable.

    It is ``apex_te.ops.focal_loss.focal_loss``, whose documentation has the formula
    (arXiv 1708.02002) and the labels that ``label_smoothing`` gives.

    Args:
        cls_output: logits [..., C], float32, float16 or bfloat16.
        cls_targets_at_level: [...] int64, the class of each row; rows of -2 are ignored, other
            values outside the classes, such as -1, have only background.
        num_positive_sum: one float32 element, the divisor of the loss.
        num_real_classes: number of classes; later columns of the logits are padding.
        alpha: weight of the target's class; the others have 1 - alpha.
        gamma: exponent, at least 0.
        label_smoothing: 0 to 1.

    Returns:
        A float32 scalar.

    Raises:
        TypeError: a tensor has another dtype than those above.
        ValueError: a shape does not match, or a number is out of range.

    Source: apex.contrib.focal_loss.
    """
    return FocalLoss.apply(
        cls_output, cls_targets_at_level, num_positive_sum, num_real_classes, alpha, gamma,
        label_smoothing,
    )  # fmt: skip
