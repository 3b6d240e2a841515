"""Fused optimizers: torch.optim's Adam, AdamW and SGD, and LAMB, each step in a few launches."""

from .fused_adam import FusedAdam
from .fused_lamb import FusedLAMB
from .fused_sgd import FusedSGD

__all__ = ["FusedAdam", "FusedLAMB", "FusedSGD"]
