"""GEMMs of MXFP8 and HiF8 operands, for which no supported device has matrix units.

Operands are decoded and multiplied in bf16 or fp32: in bfloat16, which holds their values, with
float32 sums on a GPU, and in float32 on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._call import call
from . import _checks, hif8, mx_quantize
from ._checked import checked
from .fp8_gemm import bias_dtype, shared_product

__all__ = ["hif8_gemm", "mx_gemm"]


@checked
def mx_gemm(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    *,
    out_dtype: Any = jnp.bfloat16,
    bias: jax.Array | None = None,
    inner: int = 1,
) -> jax.Array:
    """Computes out[M, N] = a @ b.T + bias of MXFP8 operands from ``mx_quantize``.

    Decoding may round operands' values below 2^-126, the smallest normal number.

    Args:
        a: [M, K] FP8.
        b: [N, K] FP8.
        a_scale: float8_e8m0fnu [M, ceil(K / 32)].
        b_scale: float8_e8m0fnu [N, ceil(K / 32)].
        out_dtype: bfloat16, float16 or float32.
        bias: [N], converted to the output's dtype, or to bfloat16 for a float32 output; None adds
            nothing.
        inner: number of dimensions of K, the last ones of a and b. M and N may also stand for
            several dimensions, which the result keeps.

    Raises:
        TypeError: ``out_dtype`` is not listed.
        ValueError: the shapes of a, b and bias do not match.
        jax.errors.JaxRuntimeError: an operand has a dtype that is not listed, or a scale another
            shape; raised when the program runs.
    """

    def decoded(dtype: Any, a: Any, b: Any, a_scale: Any, b_scale: Any) -> tuple[Any, Any]:
        return mx_quantize.decoded(a, a_scale, dtype), mx_quantize.decoded(b, b_scale, dtype)

    operands, dims = (a, b, a_scale, b_scale), ("m k/32", "n k/32")
    return _product("mx_gemm", operands, dims, decoded, False, out_dtype, bias, inner)


@checked
def hif8_gemm(
    a: jax.Array,
    b: jax.Array,
    a_scale_inv: jax.Array,
    b_scale_inv: jax.Array,
    *,
    out_dtype: Any = jnp.bfloat16,
    bias: jax.Array | None = None,
    inner: int = 1,
) -> jax.Array:
    """Computes out[M, N] = (a @ b.T) * a_scale_inv * b_scale_inv + bias of HiF8 data.

    Args:
        a: [M, K] uint8 HiF8 data.
        b: [N, K] uint8 HiF8 data.
        a_scale_inv, b_scale_inv: one float32 element each.
        out_dtype: bfloat16, float16 or float32.
        bias: [N], converted to the output's dtype, or to bfloat16 for a float32 output; None adds
            nothing.
        inner: number of dimensions of K, the last ones of a and b. M and N may also stand for
            several dimensions, which the result keeps.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match.
    """

    def decoded(dtype: Any, a: Any, b: Any, *_: Any) -> tuple[Any, Any]:
        return hif8.decode(a, dtype), hif8.decode(b, dtype)

    name = "hif8_gemm"
    a_scale_inv = _checks.is_scalar(name, "a_scale_inv", a_scale_inv)
    b_scale_inv = _checks.is_scalar(name, "b_scale_inv", b_scale_inv)
    operands = (a, b, a_scale_inv, b_scale_inv)
    return _product(name, operands, ("_", "_"), decoded, True, out_dtype, bias, inner)


def _product(
    name: str,
    operands: tuple[jax.Array, ...],
    dims: tuple[str, str],
    decoded: Callable[..., tuple[jax.Array, jax.Array]],
    is_scaled: bool,
    out_dtype: Any,
    bias: Any,
    inner: int,
) -> jax.Array:
    """Computes a @ b.T of decoded operands, times both scales if ``is_scaled``, plus bias [N]."""
    a, b = (_checks.array(name, each, x) for each, x in zip("ab", operands, strict=False))
    if min(a.ndim, b.ndim) <= inner or a.shape[-inner:] != b.shape[-inner:]:
        raise ValueError(
            f"{name}: a and b must be [M, K] and [N, K], got {list(a.shape)} and {list(b.shape)}"
        )
    dtype = _checks.float_dtype_of(name, "out", out_dtype)
    rest = {}
    if bias is not None:
        bias = _checks.has_shape(name, "bias", jnp.asarray(bias), b.shape[: b.ndim - inner])
        rest["bias"] = bias.astype(bias_dtype(dtype))

    def on_cpu(a: Any, b: Any, a_scale: Any, b_scale: Any, rest: Any) -> jax.Array:
        a, b = decoded(jnp.float32, a, b, a_scale, b_scale)
        product = jnp.dot(a, b.T, precision=jax.lax.Precision.HIGHEST)
        one = jnp.ones(1, jnp.float32)
        scales = (a_scale, b_scale) if is_scaled else (one, one)
        given = {"product": product, "a_scale_inv": scales[0], "b_scale_inv": scales[1], **rest}
        results = {"out": jax.ShapeDtypeStruct(product.shape, dtype)}
        return call("fp8_gemm", "fp8_gemm_epilogue", results, **given, accumulate=False)["out"]

    def on_gpu(a: Any, b: Any, a_scale: Any, b_scale: Any, rest: Any) -> jax.Array:
        a, b = decoded(jnp.bfloat16, a, b, a_scale, b_scale)
        product = jnp.dot(a, b.T, preferred_element_type=jnp.float32)
        if is_scaled:
            product = product * (a_scale.reshape(()) * b_scale.reshape(()))
        if "bias" in rest:
            product = product + rest["bias"].astype(jnp.float32)
        return product.astype(dtype)

    def product(*given: Any) -> jax.Array:
        return jax.lax.platform_dependent(*given, cpu=on_cpu, cuda=on_gpu)

    names = ("a_scale_inv", "b_scale_inv")
    scales = {n: (d, x) for n, d, x in zip(names, dims, operands[2:], strict=True)}
    return shared_product(name, product, {"a": a, "b": b}, scales, rest, inner)
