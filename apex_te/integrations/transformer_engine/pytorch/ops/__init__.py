"""Transformer Engine's operations to be put together, which exist for annotations only."""

import torch

from ..._names import not_served
from .op import BasicOperation, FusedOperation, FusibleOperation, OperationContext

_MODULE = "transformer_engine.pytorch.ops"
_REASON = "apex_te fuses inside its modules, such as LayerNormLinear and LayerNormMLP"
_BASIC = (
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "BasicLinear",
    "Bias",
    "ConstantScale",
    "Dropout",
    "GEGLU",
    "GELU",
    "GroupedLinear",
    "Identity",
    "LayerNorm",
    "MakeExtraOutput",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "ScaledSwiGLU",
    "SiLU",
    "SwiGLU",
)

for _name in _BASIC:
    globals()[_name] = not_served(f"{_MODULE}.{_name}", _REASON, BasicOperation)
Linear = not_served(f"{_MODULE}.Linear", "use transformer_engine.pytorch.Linear", FusedOperation)
Sequential = not_served(
    f"{_MODULE}.Sequential", "use torch.nn.Sequential with apex_te's modules", torch.nn.Module
)

__all__ = [
    "BasicOperation",
    "FusedOperation",
    "FusibleOperation",
    "Linear",
    "OperationContext",
    "Sequential",
    *_BASIC,
]
