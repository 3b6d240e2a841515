"""Interface of quantizers, and what they make of a tensor."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from ..ops._rows import rowwise
from ..ops.fp8_output import sides

__all__ = ["Quantized", "Quantizer", "column_sums", "fp8_dtypes"]


class Quantized(NamedTuple):
    """FP8 data of an array as a matrix [rows, cols]; None for what was not asked for.

    Rows and columns may stand for several dimensions each.

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
        any_rank: True if ``cast`` takes ``flatten_axis`` and ``multiply`` takes ``inner``, so that
            devices can share any dimension of a layer's arrays. Without it arrays are reshaped to
            matrices first, whose rows devices share by their first dimension alone.
    """

    keeps_state: bool
    any_rank: bool

    def cast(
        self,
        x: jax.Array,
        role: str,
        scale: jax.Array | None,
        *,
        rowwise: bool,
        columnwise: bool,
        with_dbias: bool = False,
        flatten_axis: int = -1,
    ) -> Quantized:
        """Casts an array as a matrix.

        Args:
            x: [rows..., cols...].
            role: "input", "weight" or "grad".
            scale: one float32 element for schemes that keep state, else None.
            rowwise: make [rows, cols].
            columnwise: make [cols, rows].
            with_dbias: sum the columns.
            flatten_axis: number of x's first dimension of columns.
        """
        ...

    def multiply(
        self,
        product: str,
        a: tuple[jax.Array, jax.Array],
        b: tuple[jax.Array, jax.Array],
        out_dtype: Any,
        bias: jax.Array | None = None,
        inner: int = 1,
    ) -> jax.Array:
        """Computes a[M..., K...] @ b[N..., K...].T + bias.

        Args:
            product: "fprop", "dgrad" or "wgrad".
            a: FP8 data and scales of a copy.
            b: FP8 data and scales of a copy.
            out_dtype: dtype of the result.
            bias: [N...] or None.
            inner: number of dimensions of K.
        """
        ...


def column_sums(x: jax.Array, flatten_axis: int = -1) -> jax.Array:
    """Returns the sums of an array's columns in its dtype, added in float32.

    Args:
        x: [rows..., cols...].
        flatten_axis: number of x's first dimension of columns.
    """

    def body(x: jax.Array) -> tuple[jax.Array]:
        return (x.astype(jnp.float32).sum(0),)

    x, ranks = sides("column_sums", x, flatten_axis)
    rule = "x: r c -> sums: + c"
    return rowwise("column_sums", rule, body, split="r c", ranks=ranks)(x)[0].astype(x.dtype)


def fp8_dtypes(recipe: Any) -> dict[str, str]:
    """Returns the names of the FP8 dtypes of a recipe by role."""
    forward, backward = recipe.fp8_format.value.dtype_names
    return {"input": forward, "weight": forward, "grad": backward}
