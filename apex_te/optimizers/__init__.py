"""Fused optimizers (Adam, AdamW, SGD and LAMB), which update all parameters in a few launches."""

from .fused_adam import FusedAdam
from .fused_lamb import FusedLAMB
from .fused_sgd import FusedSGD

__all__ = ["FusedAdam", "FusedLAMB", "FusedSGD"]
