"""Flax Linen modules under Transformer Engine's names; their numbers come from ``apex_te.jax``."""

from .dot_general import make_dot_general_cls as make_dot_general_cls
from .module import DenseGeneral as DenseGeneral
from .module import LayerNorm as LayerNorm
from .module import LayerNormDenseGeneral as LayerNormDenseGeneral
from .module import LayerNormMLP as LayerNormMLP
from .module import TransformerEngineBase as TransformerEngineBase

__all__ = [
    "DenseGeneral",
    "LayerNorm",
    "LayerNormDenseGeneral",
    "LayerNormMLP",
    "TransformerEngineBase",
    "make_dot_general_cls",
]
