"""Interface of quantizers, and what they make of a tensor."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

__all__ = ["Quantized", "Quantizer", "column_sums", "fp8_dtypes"]


class Quantized(NamedTuple):
    """FP8 data of a matrix [rows, cols]; None for what was not asked for.

    Attributes:
        rowwise: FP8 [rows, cols].
        rowwise_scale_inv: its scales.
        columnwise: FP8 [cols, rows].
        columnwise_scale_inv: its scales.
        amax: one float32 element, for schemes that keep state.
        dbias: [cols] in the matrix's dtype, the sums of its columns.
    """

    rowwise: jax.Array | None
    rowwise_scale_inv: jax.Array | None
    columnwise: jax.Array | None
    columnwise_scale_inv: jax.Array | None
    amax: jax.Array | None
    dbias: jax.Array | None


class Quantizer(Protocol):
    """Interface of a scheme: casts of inputs, weights and gradients, and their products.

    Attributes:
        keeps_state: True if ``cast`` needs a scale and returns an amax.
    """

    keeps_state: bool

    def cast(
        self,
        x: jax.Array,
        role: str,
        scale: jax.Array | None,
        *,
        rowwise: bool,
        columnwise: bool,
        with_dbias: bool = False,
    ) -> Quantized:
        """Casts a matrix.

        Args:
            x: [rows, cols].
            role: "input", "weight" or "grad".
            scale: one float32 element for schemes that keep state, else None.
            rowwise: make [rows, cols].
            columnwise: make [cols, rows].
            with_dbias: sum the columns.
        """
        ...

    def multiply(
        self,
        product: str,
        a: tuple[jax.Array, jax.Array],
        b: tuple[jax.Array, jax.Array],
        out_dtype: Any,
        bias: jax.Array | None = None,
    ) -> jax.Array:
        """Computes a[M, K] @ b[N, K].T + bias.

        Args:
            product: "fprop", "dgrad" or "wgrad".
            a: FP8 data and scales of a copy.
            b: FP8 data and scales of a copy.
            out_dtype: dtype of the result.
            bias: [N] or None.
        """
        ...


def column_sums(x: jax.Array) -> jax.Array:
    """Returns the sums of a matrix's columns in its dtype, added in float32."""
    return x.astype(jnp.float32).sum(0).astype(x.dtype)


def fp8_dtypes(recipe: Any) -> dict[str, str]:
    """Returns the names of the FP8 dtypes of a recipe by role."""
    forward, backward = recipe.fp8_format.value.dtype_names
    return {"input": forward, "weight": forward, "grad": backward}
