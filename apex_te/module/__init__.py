"""Modules that run in FP8 inside ``apex_te.fp8_autocast``."""

from typing import TYPE_CHECKING

from ..runtime.imports import attach

if TYPE_CHECKING:
    from .attention.dot_product import DotProductAttention as DotProductAttention
    from .attention.latent import MultiLatentAttention as MultiLatentAttention
    from .attention.multihead import MultiheadAttention as MultiheadAttention
    from .grouped.linear import GroupedLinear as GroupedLinear
    from .grouped.padding import Fp8Padding as Fp8Padding
    from .grouped.padding import Fp8Unpadding as Fp8Unpadding
    from .layer_norm import LayerNorm as LayerNorm
    from .layer_norm_linear import LayerNormLinear as LayerNormLinear
    from .layer_norm_mlp import LayerNormMLP as LayerNormMLP
    from .linear import Linear as Linear
    from .linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from .linear_log_probs import linear_log_probs as linear_log_probs
    from .moe_layer import MoELayer as MoELayer
    from .rms_norm import RMSNorm as RMSNorm
    from .transformer_layer import TransformerLayer as TransformerLayer

_NAMES = {
    "DotProductAttention": "attention.dot_product",
    "Fp8Padding": "grouped.padding",
    "Fp8Unpadding": "grouped.padding",
    "GroupedLinear": "grouped.linear",
    "LayerNorm": "layer_norm",
    "LayerNormLinear": "layer_norm_linear",
    "LayerNormMLP": "layer_norm_mlp",
    "Linear": "linear",
    "MoELayer": "moe_layer",
    "MultiLatentAttention": "attention.latent",
    "MultiheadAttention": "attention.multihead",
    "RMSNorm": "rms_norm",
    "TransformerLayer": "transformer_layer",
    "linear_cross_entropy": "linear_cross_entropy",
    "linear_log_probs": "linear_log_probs",
}
__all__ = [*_NAMES]
if not TYPE_CHECKING:  # type checkers know the names above, and no others
    __getattr__, __dir__ = attach(__name__, _NAMES)
