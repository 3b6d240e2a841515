"""Quantizers: how a scheme casts the tensors of a GEMM and multiplies them."""

from __future__ import annotations

import functools

from ...recipe import Recipe
from .base import Quantized, Quantizer
from .schemes import SCHEMES

__all__ = ["Quantized", "Quantizer", "quantizer_of"]


@functools.lru_cache(maxsize=64)
def quantizer_of(recipe: Recipe) -> Quantizer:
    """Returns the quantizer of a recipe that ``fp8_autocast`` has accepted."""
    return SCHEMES[recipe.quantizer](recipe)
