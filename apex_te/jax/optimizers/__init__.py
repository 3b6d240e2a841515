"""Fused optimizers as optax transformations: the compiled steps of ``apex_te.optimizers``."""

from .fused_adam import FusedAdamState as FusedAdamState
from .fused_adam import fused_adam as fused_adam
from .fused_lamb import fused_lamb as fused_lamb
from .fused_sgd import FusedSGDState as FusedSGDState
from .fused_sgd import fused_sgd as fused_sgd
from .transformation import FusedTransformation as FusedTransformation

__all__ = [
    "FusedAdamState", "FusedSGDState", "FusedTransformation", "fused_adam", "fused_lamb",
    "fused_sgd",
]  # fmt: skip
