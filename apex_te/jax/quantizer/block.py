"""Quantizer of block scaling: 1x128 blocks of inputs and gradients, 128x128 blocks of weights."""

from __future__ import annotations

from typing import Any

import jax

from ...recipe import BlockScaling
from ..fused_casts import FusedCast
from ..ops.block_quantize import block_quantize
from ..ops.fp8_gemm import block_scaled_gemm
from .base import Quantized, Quantizer, fp8_dtypes


class _Block(Quantizer):
    """Quantizer with a scale for each block."""

    block = 128
    fuses_activations = True

    def __init__(self, recipe: BlockScaling) -> None:
        self._dtypes = fp8_dtypes(recipe)
        self._options: dict[str, Any] = {
            "eps": recipe.eps, "pow2": recipe.pow2, "padded": False
        }  # fmt: skip

    def _cast(self, x: jax.Array, role: str, scale: Any, **wanted: Any) -> Quantized:
        options = {**self._options, "block_rows": 128 if role == "weight" else 1}
        return Quantized(*block_quantize(x, self._dtypes[role], **options, **wanted), None, None)

    def produce(self, source: FusedCast, role: str, scale: Any, **wanted: bool) -> Quantized:
        """Runs an op and casts its result; see ``Quantizer.produce``."""
        if not source.can_fuse_blocks:
            return super().produce(source, role, scale, **wanted)
        made = source.blocks(self._dtypes[role], **self._options, **wanted)
        return Quantized(*made, None, None)

    def _multiply(self, product: str, *operands: jax.Array, **options: Any) -> jax.Array:
        block_rows = 1 if product == "wgrad" else 128
        return block_scaled_gemm(*operands, b_block_rows=block_rows, **options)


def make(recipe: BlockScaling) -> _Block:
    """Returns the quantizer of a ``BlockScaling`` recipe."""
    return _Block(recipe)
