"""GEMMs of operands with one scale for each tensor."""

from __future__ import annotations

from typing import Any

import jax

from ..ops.fp8_gemm import fp8_gemm
from .base import Quantizer


class PerTensorProducts(Quantizer):
    """Base of quantizers whose operands have one scale each.

    Args:
        recipe: the recipe; its ``use_split_accumulator`` applies to fprop, dgrad and wgrad.
    """

    def __init__(self, recipe: Any) -> None:
        names = ("fprop", "dgrad", "wgrad")
        self._split = dict(zip(names, recipe.use_split_accumulator, strict=True))

    def _multiply(self, product: str, *operands: jax.Array, **options: Any) -> jax.Array:
        return fp8_gemm(*operands, use_split_accumulator=self._split[product], **options)
