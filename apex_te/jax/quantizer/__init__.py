"""Quantizers: how a scheme casts the tensors of a GEMM and multiplies them."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from ...recipe import Recipe
from .base import Quantized, Quantizer

__all__ = ["Quantized", "Quantizer", "quantizer_of"]


@functools.lru_cache(maxsize=64)
def quantizer_of(recipe: Recipe) -> Quantizer:
    """Returns the quantizer of a recipe that ``fp8_autocast`` has accepted."""
    module: Any = importlib.import_module(f"{__name__}.{recipe.quantizer}")
    return module.make(recipe)
