"""Optimizers with state sharded over ranks, and the optimizers of apex's older programs."""

from .....runtime.imports import attach

_NAMES = {
    "DistributedFusedAdam": "distributed_fused_adam",
    "DistributedFusedLAMB": "distributed_fused_lamb",
    "FP16_Optimizer": "fp16_optimizer",
    "FusedAdam": "fused_adam",
    "FusedLAMB": "fused_lamb",
    "FusedSGD": "fused_sgd",
}
__all__ = [*_NAMES]
__getattr__, __dir__ = attach(__name__, _NAMES)
