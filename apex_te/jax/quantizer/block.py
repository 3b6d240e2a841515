"""Quantizer of block scaling: 1x128 blocks of inputs and gradients, 128x128 blocks of weights."""

from __future__ import annotations

from typing import Any

import jax

from ...recipe import BlockScaling
from ..ops.block_quantize import block_quantize
from ..ops.fp8_gemm import block_scaled_gemm
from .base import Quantized, column_sums, fp8_dtypes

__all__ = ["make"]


class _Block:
    """Quantizer with a scale for each block."""

    keeps_state = False
    any_rank = True

    def __init__(self, recipe: BlockScaling) -> None:
        self._dtypes = fp8_dtypes(recipe)
        self._options: dict[str, Any] = {"eps": recipe.eps, "pow2": recipe.pow2}

    def cast(
        self,
        x: jax.Array,
        role: str,
        scale: Any,
        *,
        rowwise: bool,
        columnwise: bool,
        with_dbias: bool = False,
        flatten_axis: int = -1,
    ) -> Quantized:
        """Casts an array as a matrix; see ``Quantizer.cast``."""
        made = block_quantize(
            x,
            self._dtypes[role],
            block_rows=128 if role == "weight" else 1,
            rowwise=rowwise,
            columnwise=columnwise,
            flatten_axis=flatten_axis,
            padded=False,
            **self._options,
        )
        return Quantized(*made, None, column_sums(x, flatten_axis) if with_dbias else None)

    def multiply(
        self,
        product: str,
        a: tuple[jax.Array, jax.Array],
        b: tuple[jax.Array, jax.Array],
        out_dtype: Any,
        bias: jax.Array | None = None,
        inner: int = 1,
    ) -> jax.Array:
        """Multiplies two copies; see ``Quantizer.multiply``."""
        block_rows = 1 if product == "wgrad" else 128
        return block_scaled_gemm(
            a[0], b[0], a[1], b[1], b_block_rows=block_rows, out_dtype=out_dtype, bias=bias,
            inner=inner,
        )  # fmt: skip


def make(recipe: BlockScaling) -> _Block:
    """Returns the quantizer of a ``BlockScaling`` recipe."""
    return _Block(recipe)
