"""apex.contrib.groupbn: batch normalisation of channels-last images over groups of ranks."""

from .batch_norm import BatchNorm2d_NHWC

__all__ = ["BatchNorm2d_NHWC"]
