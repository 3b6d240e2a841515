"""Quantizer of MXFP8: a power-of-two scale for every 32 elements."""

from __future__ import annotations

from typing import Any

import jax

from ...recipe import MXFP8Scaling
from ..ops.emulated_gemm import mx_gemm
from ..ops.mx_quantize import mx_quantize
from .base import Quantized, Quantizer, fp8_dtypes


class _MX(Quantizer):
    """Quantizer with a power-of-two scale per 32 elements along a GEMM's inner dimension."""

    block = 32

    def __init__(self, recipe: MXFP8Scaling) -> None:
        self._dtypes = fp8_dtypes(recipe)
        self._rounding = recipe.rounding

    def _cast(self, x: jax.Array, role: str, scale: Any, **wanted: Any) -> Quantized:
        made = mx_quantize(x, self._dtypes[role], rounding=self._rounding, **wanted)
        return Quantized(*made, None, None)

    def _multiply(self, product: str, *operands: jax.Array, **options: Any) -> jax.Array:
        return mx_gemm(*operands, **options)


def make(recipe: MXFP8Scaling) -> _MX:
    """Returns the quantizer of an ``MXFP8Scaling`` recipe."""
    return _MX(recipe)
