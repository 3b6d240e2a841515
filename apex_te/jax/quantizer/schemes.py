"""Quantizers of the schemes: delayed, current and block scaling, HiFloat8 and MXFP8."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..fused_casts import FusedCast
from ..ops import hif8
from ..ops.block_quantize import block_quantize
from ..ops.cast_transpose import cast_transpose
from ..ops.current_scale import current_scale, scale_of
from ..ops.emulated_gemm import hif8_gemm, mx_gemm
from ..ops.fp8_gemm import block_scaled_gemm, fp8_gemm
from ..ops.mx_quantize import mx_quantize
from .base import Quantized, Quantizer


def _one_scale(made: Any, amax: jax.Array | None = None) -> Quantized:
    """Returns the output of an op that casts with one scale as a ``Quantized``."""
    inverse = made.scale_inv
    return Quantized(made.rowwise, inverse, made.columnwise, inverse, amax, None)


class _FP8(Quantizer):
    """Base of quantizers to a recipe's FP8 dtypes."""

    def __init__(self, recipe: Any) -> None:
        self._recipe = recipe
        forward, backward = recipe.fp8_format.value.dtype_names
        self._dtypes = {"input": forward, "weight": forward, "grad": backward}


class _PerTensor(_FP8):
    """Base of quantizers whose operands have one scale each."""

    fuses_activations = True
    fuses_norms = True

    def __init__(self, recipe: Any) -> None:
        super().__init__(recipe)
        names = ("fprop", "dgrad", "wgrad")
        self._split = dict(zip(names, recipe.use_split_accumulator, strict=True))

    def _multiply(self, product: str, *operands: jax.Array, **options: Any) -> jax.Array:
        return fp8_gemm(*operands, use_split_accumulator=self._split[product], **options)


class _Delayed(_PerTensor):
    """Quantizer with one scale for each tensor, from earlier steps; notes the amax."""

    keeps_state = True

    def cast(self, x: jax.Array, role: str, scale: Any, **wanted: Any) -> Quantized:
        """Casts an array as a matrix; see ``Quantizer.cast``."""
        amax = jnp.zeros(1, jnp.float32)
        # The op sums the columns, too.
        made = cast_transpose(x, scale, self._dtypes[role], amax=amax, **wanted)
        return _one_scale(made, made.amax)._replace(dbias=made.dbias)

    def produce(self, source: FusedCast, role: str, scale: Any, **wanted: bool) -> Quantized:
        """Runs an op and casts its result; see ``Quantizer.produce``."""
        if not source.can_fuse:
            return super().produce(source, role, scale, **wanted)
        start, dtype = jnp.zeros(1, jnp.float32), self._dtypes[role]
        made, dbias = source.fp8(scale, dtype, **wanted, amax=start)
        return _one_scale(made, made.amax)._replace(dbias=dbias)


class _Current(_PerTensor):
    """Quantizer with one scale for each tensor, from the tensor itself."""

    def __init__(self, recipe: Any) -> None:
        super().__init__(recipe)
        self._options: dict[str, Any] = {"eps": recipe.eps, "pow2": recipe.pow2}

    def _cast(self, x: jax.Array, role: str, scale: Any, **wanted: Any) -> Quantized:
        return _one_scale(current_scale(x, self._dtypes[role], **self._options, **wanted))

    def produce(self, source: FusedCast, role: str, scale: Any, **wanted: bool) -> Quantized:
        """Runs an op twice, the first time only for its result's amax; see ``Quantizer.produce``.

        This is cheaper than storing the result in bf16 or fp32.
        """
        # As on PyTorch's side the columns of what is only copied are added in high precision.
        if not source.can_fuse or (source.copies and source.with_dbias):
            return super().produce(source, role, scale, **wanted)
        dtype, nothing = self._dtypes[role], {"rowwise": False, "columnwise": False}
        start, unused = jnp.zeros(1, jnp.float32), jnp.ones(1, jnp.float32)
        measured, _ = source.fp8(unused, dtype, **nothing, amax=start)
        scale, scale_inv = scale_of(measured.amax, dtype, **self._options)
        made, dbias = source.fp8(scale, dtype, **wanted, amax=None)
        # The op's own inverse of the scale does not show an infinite amax.
        return _one_scale(made._replace(scale_inv=scale_inv))._replace(dbias=dbias)


class _Block(_FP8):
    """Quantizer with 1x128 blocks of inputs and gradients and 128x128 blocks of weights."""

    block = 128
    fuses_activations = True

    def __init__(self, recipe: Any) -> None:
        super().__init__(recipe)
        self._options: dict[str, Any] = {"eps": recipe.eps, "scales": recipe.scales}
        self._options["padded"] = False
        self._wgrad_rows = self.block if recipe.wgrad_input == "128x128" else 1

    def _cast(self, x: jax.Array, role: str, scale: Any, **wanted: Any) -> Quantized:
        options = {**self._options, "block_rows": 128 if role == "weight" else 1}
        if role == "input":
            options["columnwise_block_rows"] = self._wgrad_rows
        return Quantized(*block_quantize(x, self._dtypes[role], **options, **wanted), None, None)

    def produce(self, source: FusedCast, role: str, scale: Any, **wanted: Any) -> Quantized:
        """Runs an op and casts its result; see ``Quantizer.produce``."""
        if not source.can_fuse_blocks:
            return super().produce(source, role, scale, **wanted)
        if role == "input":
            wanted["columnwise_block_rows"] = self._wgrad_rows
        made = source.blocks(self._dtypes[role], **self._options, **wanted)
        return Quantized(*made, None, None)

    def _multiply(self, product: str, *operands: jax.Array, **options: Any) -> jax.Array:
        # The input is the first operand of a weight gradient, [in, out].
        rows = (self._wgrad_rows, 1) if product == "wgrad" else (1, 128)
        return block_scaled_gemm(*operands, a_block_rows=rows[0], b_block_rows=rows[1], **options)


class _HiF8(Quantizer):
    """Quantizer with one scale for each tensor, from the tensor itself; its data are uint8."""

    def __init__(self, recipe: Any) -> None:
        limits = recipe.fp8_format.value  # what amax values are scaled to, 15 or 224
        self._targets = {"input": limits.max_fwd, "weight": limits.max_fwd, "grad": limits.max_bwd}
        self._options: dict[str, Any] = {"eps": recipe.eps, "pow2": recipe.pow2}

    def _cast(self, x: jax.Array, role: str, scale: Any, **wanted: Any) -> Quantized:
        return _one_scale(hif8.quantize_current(x, self._targets[role], **self._options, **wanted))

    def _multiply(self, product: str, *operands: jax.Array, **options: Any) -> jax.Array:
        return hif8_gemm(*operands, **options)


class _MX(_FP8):
    """Quantizer with a power-of-two scale per 32 elements along a GEMM's inner dimension."""

    block = 32

    def _cast(self, x: jax.Array, role: str, scale: Any, **wanted: Any) -> Quantized:
        made = mx_quantize(x, self._dtypes[role], rounding=self._recipe.rounding, **wanted)
        return Quantized(*made, None, None)

    def _multiply(self, product: str, *operands: jax.Array, **options: Any) -> jax.Array:
        return mx_gemm(*operands, **options)


# By the name that a recipe has for its quantizer.
SCHEMES: dict[str, type[Any]] = {
    "delayed": _Delayed, "current": _Current, "hif8": _HiF8, "block": _Block, "mx": _MX,
}  # fmt: skip
