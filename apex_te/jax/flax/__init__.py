"""Flax Linen modules under Transformer Engine's names; their numbers come from ``apex_te.jax``."""

from .attention import DotProductAttention as DotProductAttention
from .attention import MultiHeadAttention as MultiHeadAttention
from .dot_general import make_dot_general_cls as make_dot_general_cls
from .dot_general import make_einsum_cls as make_einsum_cls
from .from_flax import from_flax as from_flax
from .logical_axes import extend_logical_axis_rules as extend_logical_axis_rules
from .module import DenseGeneral as DenseGeneral
from .module import LayerNorm as LayerNorm
from .module import LayerNormDenseGeneral as LayerNormDenseGeneral
from .module import LayerNormMLP as LayerNormMLP
from .module import TransformerEngineBase as TransformerEngineBase
from .moe import MoEBlock as MoEBlock
from .relative_position import RelativePositionBiases as RelativePositionBiases
from .transformer import TransformerLayer as TransformerLayer
from .transformer import TransformerLayerType as TransformerLayerType

__all__ = [
    "DenseGeneral", "DotProductAttention", "LayerNorm", "LayerNormDenseGeneral", "LayerNormMLP",
    "MoEBlock", "MultiHeadAttention", "RelativePositionBiases", "TransformerEngineBase",
    "TransformerLayer", "TransformerLayerType", "extend_logical_axis_rules", "from_flax",
    "make_dot_general_cls", "make_einsum_cls",
]  # fmt: skip
