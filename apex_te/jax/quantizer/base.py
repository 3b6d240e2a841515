"""Interface of quantizers, and what they make of a tensor."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ..checkpoint_policies import FP8_CAST_NAME, FP8_PRODUCT_NAME, named
from ..fused_casts import FusedCast
from ..ops._rows import rowwise as over_rows
from ..ops.fp8_output import sides


class Quantized(NamedTuple):
    """FP8 data of an array as a matrix [rows, cols]; None for a field that was not requested.

    Rows and columns may stand for several dimensions each.

    Attributes:
        rowwise, rowwise_scale_inv: the matrix and its scales, in the scheme's layout.
        columnwise, columnwise_scale_inv: its transpose, and the scales of that.
        amax: one float32 element; None for schemes without state.
        dbias: [cols] in the matrix's dtype, its column sums.
    """

    rowwise: jax.Array | None
    rowwise_scale_inv: jax.Array | None
    columnwise: jax.Array | None
    columnwise_scale_inv: jax.Array | None
    amax: jax.Array | None
    dbias: jax.Array | None

    def named(self) -> Quantized:
        """Returns the same arrays, all but ``dbias`` named for ``jax.checkpoint`` policies."""
        fields = {key: named(FP8_CAST_NAME, x) for key, x in self._asdict().items()}
        return Quantized(**{**fields, "dbias": self.dbias})


class Quantizer:
    """Base of quantizers, which cast inputs, weights and gradients and multiply the results.

    A subclass defines ``_cast`` and ``_multiply``.

    Attributes:
        keeps_state: True if ``cast`` needs a scale and returns an amax.
        block: number of adjacent elements that share a scale and must be on one device.
        fuses_activations: True if gated activations write FP8 themselves in ``produce``.
        fuses_norms: True if norms write FP8 themselves in ``produce``.
    """

    keeps_state = False
    block = 1
    fuses_activations = False
    fuses_norms = False

    def cast(
        self,
        x: jax.Array,
        role: str,
        scale: jax.Array | None,
        *,
        with_dbias: bool = False,
        **wanted: Any,
    ) -> Quantized:
        """Casts an array [rows..., cols...] as a matrix.

        Args:
            x: the array.
            role: "input", "weight" or "grad".
            scale: one float32 element for schemes that keep state, else None.
            with_dbias: also sum the columns.
            wanted: ``rowwise`` and ``columnwise``, the copies to make, and ``flatten_axis``, the
                first dimension of columns.
        """
        made = self._cast(x, role, scale, **wanted)
        if not with_dbias:
            return made
        return made._replace(dbias=column_sums(x, wanted["flatten_axis"]))

    def produce(
        self, source: FusedCast, role: str, scale: jax.Array | None, *, rowwise: bool,
        columnwise: bool,
    ) -> Quantized:  # fmt: skip
        """Runs an op and casts its result; the op writes FP8 itself if it and the scheme can."""
        x, dbias = source.plain()
        made = self.cast(
            x, role, scale, flatten_axis=source.flatten_axis, rowwise=rowwise,
            columnwise=columnwise, with_dbias=source.with_dbias and dbias is None,
        )  # fmt: skip
        return made if dbias is None else made._replace(dbias=dbias)

    def multiply(
        self, product: str, a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array],
        **options: Any,
    ) -> jax.Array:  # fmt: skip
        """Computes a[M..., K...] @ b[N..., K...].T + bias, for "fprop", "dgrad" or "wgrad".

        ``a`` and ``b`` are pairs (FP8 data, scales). ``options`` are ``out_dtype``, ``bias`` [N...]
        or None, and ``inner``, the number of dimensions of K.
        """
        out = self._multiply(product, a[0], b[0], a[1], b[1], **options)
        return checkpoint_name(out, FP8_PRODUCT_NAME) if product == "fprop" else out

    def _cast(self, x: jax.Array, role: str, scale: Any, **wanted: Any) -> Quantized:
        """Casts an array without the sums of its columns."""
        raise NotImplementedError

    def _multiply(self, product: str, *operands: jax.Array, **options: Any) -> jax.Array:
        """Multiplies FP8 data of two copies, followed by their scales."""
        raise NotImplementedError


def column_sums(x: jax.Array, flatten_axis: int = -1) -> jax.Array:
    """Returns the sums of an array's columns in its dtype, added in float32."""

    def body(x: jax.Array) -> tuple[jax.Array]:
        return (x.astype(jnp.float32).sum(0),)

    x, ranks = sides("column_sums", x, flatten_axis)
    rule = "x: r c -> sums: + c"
    return over_rows("column_sums", rule, body, split="r c", ranks=ranks)(x)[0].astype(x.dtype)
