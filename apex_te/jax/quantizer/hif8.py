"""Quantizer of current scaling to HiFloat8, with scales that bring amax values to 15 or 224."""

from __future__ import annotations

from typing import Any

import jax

from ...recipe import CurrentScaling
from ..ops import hif8
from ..ops.emulated_gemm import hif8_gemm
from .base import Quantized, Quantizer, one_scale


class _HiF8(Quantizer):
    """Quantizer with one scale for each tensor, from the tensor itself; its data are uint8."""

    def __init__(self, recipe: CurrentScaling) -> None:
        limits = recipe.fp8_format.value
        self._targets = {"input": limits.max_fwd, "weight": limits.max_fwd, "grad": limits.max_bwd}
        self._options: dict[str, Any] = {"eps": recipe.eps, "pow2": recipe.pow2}

    def _cast(self, x: jax.Array, role: str, scale: Any, **wanted: Any) -> Quantized:
        return one_scale(hif8.quantize_current(x, self._targets[role], **self._options, **wanted))

    def _multiply(self, product: str, *operands: jax.Array, **options: Any) -> jax.Array:
        return hif8_gemm(*operands, **options)


def make(recipe: CurrentScaling) -> _HiF8:
    """Returns the quantizer of a ``CurrentScaling`` recipe with ``Format.HIF8``."""
    return _HiF8(recipe)
