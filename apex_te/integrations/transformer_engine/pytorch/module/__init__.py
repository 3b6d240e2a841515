"""Transformer Engine's modules, their base class and the buffers they share."""

from .base import (
    TransformerEngineBaseModule,
    UserBufferQuantizationMode,
    destroy_ub,
    get_dummy_wgrad,
    get_workspace,
    initialize_ub,
)
from .fp8_padding import Fp8Padding
from .fp8_unpadding import Fp8Unpadding
from .grouped_linear import GroupedLinear
from .layernorm import LayerNorm
from .layernorm_linear import LayerNormLinear
from .layernorm_mlp import LayerNormMLP
from .linear import Linear
from .rmsnorm import RMSNorm

__all__ = [
    "Fp8Padding", "Fp8Unpadding", "GroupedLinear", "LayerNorm", "LayerNormLinear", "LayerNormMLP",
    "Linear", "RMSNorm", "TransformerEngineBaseModule", "UserBufferQuantizationMode", "destroy_ub",
    "get_dummy_wgrad", "get_workspace", "initialize_ub",
]  # fmt: skip
