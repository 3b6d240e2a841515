"""Quantizer of MXFP8: a power-of-two scale for every 32 elements."""

from __future__ import annotations

from typing import Any

import jax

from ...recipe import MXFP8Scaling
from ..ops.emulated_gemm import mx_gemm
from ..ops.mx_quantize import mx_quantize
from .base import Quantized, column_sums, fp8_dtypes

__all__ = ["make"]


class _MX:
    """Quantizer with a power-of-two scale for every 32 elements along a product's inner dimension.

    Args:
        recipe: the recipe.
    """

    keeps_state = False

    def __init__(self, recipe: MXFP8Scaling) -> None:
        self._dtypes = fp8_dtypes(recipe)
        self._rounding = recipe.rounding

    def cast(
        self,
        x: jax.Array,
        role: str,
        scale: Any,
        *,
        rowwise: bool,
        columnwise: bool,
        with_dbias: bool = False,
    ) -> Quantized:
        """Casts a matrix; see ``Quantizer.cast``."""
        wanted = {"rowwise": rowwise, "columnwise": columnwise}
        made = mx_quantize(x, self._dtypes[role], rounding=self._rounding, **wanted)
        return Quantized(*made, None, column_sums(x) if with_dbias else None)

    def multiply(
        self,
        product: str,
        a: tuple[jax.Array, jax.Array],
        b: tuple[jax.Array, jax.Array],
        out_dtype: Any,
        bias: jax.Array | None = None,
    ) -> jax.Array:
        """Multiplies two copies; see ``Quantizer.multiply``."""
        return mx_gemm(a[0], b[0], a[1], b[1], out_dtype=out_dtype, bias=bias)


def make(recipe: MXFP8Scaling) -> _MX:
    """Returns the quantizer of an ``MXFP8Scaling`` recipe."""
    return _MX(recipe)
