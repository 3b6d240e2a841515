"""Layer norm of a hidden size."""

from .layer_norm import FastLayerNorm

__all__ = ["FastLayerNorm"]
