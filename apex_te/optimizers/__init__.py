"""Fused optimizers (Adam, AdamW, SGD and LAMB), which update all parameters in a few launches."""

from typing import TYPE_CHECKING

from ..runtime.imports import attach
from .fused_adam import FusedAdam
from .fused_lamb import FusedLAMB
from .fused_sgd import FusedSGD

__all__ = ["FusedAdam", "FusedLAMB", "FusedSGD"]

if not TYPE_CHECKING:  # type checkers know the names above, and no others
    __getattr__, __dir__ = attach(__name__, {})
