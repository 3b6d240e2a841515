"""Modules that run in FP8 inside ``apex_te.fp8_autocast``."""

from .layer_norm_linear import LayerNormLinear
from .layer_norm_mlp import LayerNormMLP
from .linear import Linear

__all__ = ["LayerNormLinear", "LayerNormMLP", "Linear"]
