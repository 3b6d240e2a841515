"""Modules that run in FP8 inside ``apex_te.fp8_autocast``."""

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from .dot_product_attention import DotProductAttention as DotProductAttention
    from .fp8_padding import Fp8Padding as Fp8Padding
    from .fp8_padding import Fp8Unpadding as Fp8Unpadding
    from .grouped_linear import GroupedLinear as GroupedLinear
    from .layer_norm import LayerNorm as LayerNorm
    from .layer_norm_linear import LayerNormLinear as LayerNormLinear
    from .layer_norm_mlp import LayerNormMLP as LayerNormMLP
    from .linear import Linear as Linear
    from .multihead_attention import MultiheadAttention as MultiheadAttention
    from .rms_norm import RMSNorm as RMSNorm
    from .transformer_layer import TransformerLayer as TransformerLayer

_NAMES = {
    "DotProductAttention": "dot_product_attention",
    "Fp8Padding": "fp8_padding",
    "Fp8Unpadding": "fp8_padding",
    "GroupedLinear": "grouped_linear",
    "LayerNorm": "layer_norm",
    "LayerNormLinear": "layer_norm_linear",
    "LayerNormMLP": "layer_norm_mlp",
    "Linear": "linear",
    "MultiheadAttention": "multihead_attention",
    "RMSNorm": "rms_norm",
    "TransformerLayer": "transformer_layer",
}
__all__ = [*_NAMES]
__getattr__, __dir__ = attach(__name__, _NAMES)
