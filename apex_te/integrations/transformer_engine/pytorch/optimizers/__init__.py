"""Fused optimizers and operations on lists of tensors under Transformer Engine's names."""

from ..._names import not_served
from .fused_adam import FusedAdam
from .fused_sgd import FusedSGD
from .multi_tensor_apply import (
    MultiTensorApply,
    multi_tensor_adam,
    multi_tensor_adam_capturable,
    multi_tensor_adam_capturable_master,
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_scale_tensor,
    multi_tensor_sgd,
    multi_tensor_unscale_l2norm,
)

_MODULE = "transformer_engine.pytorch.optimizers.newton_schulz"
_NO_MUON = "no orthogonalisation of gradients is here; take that of your optimizer"
CusolverMpCtx = not_served(f"{_MODULE}.CusolverMpCtx", _NO_MUON)
newton_schulz = not_served(f"{_MODULE}.newton_schulz", _NO_MUON)
newton_schulz_tp = not_served(f"{_MODULE}.newton_schulz_tp", _NO_MUON)
multi_tensor_adam_fp8 = not_served(
    "transformer_engine.pytorch.optimizers.multi_tensor_adam_fp8",
    "FusedAdam updates FP8 weights, by their master weights",
)

__all__ = [
    "CusolverMpCtx", "FusedAdam", "FusedSGD", "MultiTensorApply", "multi_tensor_adam",
    "multi_tensor_adam_capturable", "multi_tensor_adam_capturable_master", "multi_tensor_adam_fp8",
    "multi_tensor_applier", "multi_tensor_l2norm", "multi_tensor_scale",
    "multi_tensor_scale_tensor", "multi_tensor_sgd", "multi_tensor_unscale_l2norm", "newton_schulz",
    "newton_schulz_tp",
]  # fmt: skip
