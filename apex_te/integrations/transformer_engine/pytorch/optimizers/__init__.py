"""Fused optimizers and operations on lists of tensors under Transformer Engine's names."""

from .fused_adam import FusedAdam
from .fused_sgd import FusedSGD
from .multi_tensor_apply import (
    MultiTensorApply,
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_scale_tensor,
)

__all__ = [
    "FusedAdam",
    "FusedSGD",
    "MultiTensorApply",
    "multi_tensor_applier",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
]
