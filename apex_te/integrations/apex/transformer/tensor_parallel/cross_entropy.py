"""Cross entropy of logits whose vocabulary is split over ranks."""

from __future__ import annotations

import torch

from .....distributed.cross_entropy import parallel_cross_entropy
from .. import parallel_state


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor, target: torch.Tensor, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Computes the loss of each target from this rank's columns of the logits.

    Args:
        vocab_parallel_logits: [..., vocabulary / ranks].
        target: [...] integers, the same on all ranks.
        label_smoothing: probability that is spread over the classes other than the target.

    Returns:
        The losses [...], in float32.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    classes = (
        vocab_parallel_logits.shape[-1] * parallel_state.get_tensor_model_parallel_world_size()
    )
    # the op spreads it over all classes
    smoothing = label_smoothing * classes / max(1, classes - 1)
    return parallel_cross_entropy(
        vocab_parallel_logits, target, group=group, label_smoothing=smoothing, reduction="none"
    )
