"""Products of operands with one scale for each tensor."""

from __future__ import annotations

from typing import Any

import jax

from ..ops.fp8_gemm import fp8_gemm

__all__ = ["PerTensorProducts"]


class PerTensorProducts:
    """Base of quantizers whose operands have one scale each.

    Args:
        recipe: the recipe, which says where partial sums are kept in float32.
    """

    def __init__(self, recipe: Any) -> None:
        names = ("fprop", "dgrad", "wgrad")
        self._split = dict(zip(names, recipe.use_split_accumulator, strict=True))

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
        return fp8_gemm(
            a[0],
            b[0],
            a[1],
            b[1],
            out_dtype=out_dtype,
            bias=bias,
            use_split_accumulator=self._split[product],
            inner=inner,
        )
