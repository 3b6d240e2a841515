"""``SoftmaxCrossEntropyLoss`` over ``apex_te.ops.cross_entropy``."""

from __future__ import annotations

import torch

from .....ops.cross_entropy import cross_entropy


class SoftmaxCrossEntropyLoss:
    """Cross entropy of softmax(logits) and labels, one loss for each row.

    It is not a module: call ``SoftmaxCrossEntropyLoss.apply``.

    Source: apex.contrib.xentropy.
    """

    @staticmethod
    def apply(
        logits: torch.Tensor,
        labels: torch.Tensor,
        smoothing: float = 0.0,
        padding_idx: int = 0,
        half_to_float: bool = False,
    ) -> torch.Tensor:
        """Computes the losses by ``apex_te.ops.cross_entropy.cross_entropy``; it is differentiable.

        Args:
            logits: [rows, classes] float32, float16 or bfloat16.
            labels: [rows] int64 or int32.
            smoothing: in [0, 1], the part of the label's probability spread over all classes.
            padding_idx: rows with this label have loss 0 and gradient 0; the default ignores class
                0.
            half_to_float: return float32 for 16-bit logits.

        Returns:
            The losses [rows] in the dtype of the logits, or float32.

        Raises:
            TypeError: a dtype is not listed.
            ValueError: a shape or ``smoothing`` does not match.
        """
        loss = cross_entropy(
            logits, labels, ignore_index=padding_idx, label_smoothing=smoothing, reduction="none"
        )
        return loss if half_to_float else loss.to(logits.dtype)
