"""Single operations of Transformer Engine that can be used by themselves."""

from .l2normalization import L2Normalization

__all__ = ["L2Normalization"]
