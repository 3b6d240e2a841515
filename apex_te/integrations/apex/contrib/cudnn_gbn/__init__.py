"""apex.contrib.cudnn_gbn: batch normalisation over groups of ranks, in channels_last memory."""

from .batch_norm import GroupBatchNorm2d

__all__ = ["GroupBatchNorm2d"]
