"""Cross entropy of a vocabulary that may be split over ranks, by Transformer Engine's name."""

from __future__ import annotations

import torch

from ....distributed import cross_entropy as _cross_entropy
from .constants import dist_group_type

__all__ = ["parallel_cross_entropy"]


def parallel_cross_entropy(
    inp: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: dist_group_type | None = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
) -> torch.Tensor:
    """Computes the cross entropy of softmax(inp) and targets; differentiable in ``inp``.

    Args:
        inp: [.., .., V] float32, float16 or bfloat16; with a group this rank's columns of the
            vocabulary, as many on each rank.
        target: the shape of ``inp`` without the last dimension, int64 or int32, indices into the
            whole vocabulary.
        label_smoothing: in [0, 1], share of the target's probability spread over the vocabulary.
        reduce_loss: return the mean over all rows that are not ignored.
        dist_process_group: process group over which the vocabulary is split; None if it is not.
        ignore_idx: rows with this target have loss 0 and gradient 0.
        is_cg_capturable: has no effect; the function can be captured in a CUDA graph.
    """
    return _cross_entropy.parallel_cross_entropy(
        inp, target, group=dist_process_group, ignore_index=ignore_idx,
        label_smoothing=label_smoothing, reduction="mean" if reduce_loss else "none",
    )  # fmt: skip
