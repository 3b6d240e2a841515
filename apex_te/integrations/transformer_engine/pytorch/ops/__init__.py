"""Transformer Engine's operations to be put together, which exist for annotations only."""

import torch

from ..._names import not_served
from .basic import L2Normalization
from .op import BasicOperation, FusedOperation, FusibleOperation, OperationContext

_MODULE = "transformer_engine.pytorch.ops"
_REASON = "apex_te fuses inside its modules, such as LayerNormLinear and LayerNormMLP"
_BASIC = (
    "AddExtraInput", "AllGather", "AllReduce", "BasicLinear", "Bias", "ClampedSwiGLU",
    "ConstantScale", "Dropout", "GEGLU", "GELU", "GLU", "GroupedLinear", "Identity", "LayerNorm",
    "MakeExtraOutput", "QGEGLU", "QGELU", "Quantize", "RMSNorm", "ReGLU", "ReLU", "ReduceScatter",
    "Reshape", "SReGLU", "SReLU", "ScaledClampedQGeGLU", "ScaledSwiGLU", "SiLU", "SwiGLU",
)  # fmt: skip

for _name in _BASIC:
    globals()[_name] = not_served(f"{_MODULE}.{_name}", _REASON, BasicOperation)
_FUSIONS = (
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
)
for _name in _FUSIONS:
    globals()[_name] = not_served(f"{_MODULE}.{_name}", _REASON)
Linear = not_served(f"{_MODULE}.Linear", "use transformer_engine.pytorch.Linear", FusedOperation)
Sequential = not_served(
    f"{_MODULE}.Sequential", "use torch.nn.Sequential with apex_te's modules", torch.nn.Module
)

__all__ = [
    "BasicOperation",
    "FusedOperation",
    "FusibleOperation",
    "L2Normalization",
    "Linear",
    "OperationContext",
    "Sequential",
    *_BASIC,
    *_FUSIONS,
]
