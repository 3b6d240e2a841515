"""Quantizer of current scaling to HiFloat8, with scales that bring amaxes to 15 or 224."""

from __future__ import annotations

from typing import Any

import jax

from ...recipe import CurrentScaling
from ..ops import hif8
from ..ops.emulated_gemm import hif8_gemm
from .base import Quantized, column_sums

__all__ = ["make"]


class _HiF8:
    """Quantizer with one scale for each tensor, from the tensor itself; its data are uint8.

    Args:
        recipe: the recipe.
    """

    keeps_state = False
    any_rank = True

    def __init__(self, recipe: CurrentScaling) -> None:
        limits = recipe.fp8_format.value
        self._targets = {"input": limits.max_fwd, "weight": limits.max_fwd, "grad": limits.max_bwd}
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
        wanted: dict[str, Any] = {"rowwise": rowwise, "columnwise": columnwise}
        wanted["flatten_axis"] = flatten_axis
        made = hif8.quantize_current(x, self._targets[role], **wanted, **self._options)
        inverse = made.scale_inv
        dbias = column_sums(x, flatten_axis) if with_dbias else None
        return Quantized(made.rowwise, inverse, made.columnwise, inverse, None, dbias)

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
        return hif8_gemm(a[0], b[0], a[1], b[1], out_dtype=out_dtype, bias=bias, inner=inner)


def make(recipe: CurrentScaling) -> _HiF8:
    """Returns the quantizer of a ``CurrentScaling`` recipe with ``Format.HIF8``."""
    return _HiF8(recipe)
