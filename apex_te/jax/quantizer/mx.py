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
    any_rank = True

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
        flatten_axis: int = -1,
    ) -> Quantized:
        """Casts an array as a matrix; see ``Quantizer.cast``."""
        wanted: dict[str, Any] = {"rowwise": rowwise, "columnwise": columnwise}
        wanted["flatten_axis"] = flatten_axis
        made = mx_quantize(x, self._dtypes[role], rounding=self._rounding, **wanted)
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
        return mx_gemm(a[0], b[0], a[1], b[1], out_dtype=out_dtype, bias=bias, inner=inner)


def make(recipe: MXFP8Scaling) -> _MX:
    """Returns the quantizer of an ``MXFP8Scaling`` recipe."""
    return _MX(recipe)
