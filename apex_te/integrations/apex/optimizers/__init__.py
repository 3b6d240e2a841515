"""Fused optimizers with apex's arguments; a parameter group counts the steps, as in apex."""

from ....runtime.imports import attach

_NAMES = {
    "FusedAdagrad": "fused_adagrad",
    "FusedAdam": "fused_adam",
    "FusedLAMB": "fused_lamb",
    "FusedLARS": "fused_lars",
    "FusedMixedPrecisionLamb": "fused_mixed_precision_lamb",
    "FusedNovoGrad": "fused_novograd",
    "FusedSGD": "fused_sgd",
}
__all__ = [*_NAMES]
__getattr__, __dir__ = attach(__name__, _NAMES)
