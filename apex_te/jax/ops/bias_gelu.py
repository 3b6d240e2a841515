"""GELU of x + bias, forward and backward with the bias gradient, also with a fused cast to FP8."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from ...runtime import op_options
from ._checked import checked
from ._contract import run
from ._gradient import keeping_inputs
from .fp8_output import FP8Output, cast_of_activation

__all__ = [
    "BiasGeluFP8Grads", "BiasGeluGrads", "bias_gelu", "bias_gelu_bwd", "bias_gelu_bwd_fp8",
    "bias_gelu_fwd", "bias_gelu_fwd_fp8",
]  # fmt: skip

_OP = "bias_gelu"


class BiasGeluGrads(NamedTuple):
    """Gradients of ``bias_gelu``.

    Attributes:
        input: gradient of x, of its shape and dtype.
        dbias: gradient of the bias, [cols] in x's dtype; None if not requested.
    """

    input: jax.Array
    dbias: jax.Array | None


class BiasGeluFP8Grads(NamedTuple):
    """Gradients of ``bias_gelu``, with that of x in FP8.

    Attributes:
        output: FP8 data of x's gradient, as a matrix [rows, cols].
        dbias: gradient of the bias, [cols] in x's dtype; None if not requested.
    """

    output: FP8Output
    dbias: jax.Array | None


@checked
def bias_gelu(x: jax.Array, bias: jax.Array | None = None, *, form: str = "tanh") -> jax.Array:
    """Computes gelu(x + bias) in float32, rounded once, differentiably.

    If the sum is NaN, value and gradient are NaN. If it is -Inf, the value is NaN; if it is
    infinite, the gradient is NaN.

    Args:
        x: [..., cols] float32, float16 or bfloat16.
        bias: [cols] in x's dtype; None adds nothing.
        form: "tanh" or "erf" (exact).

    Returns:
        An array of x's shape and dtype.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match, or ``form`` is not listed.
    """
    op_options.is_tanh("bias_gelu_fwd", form)
    return _differentiable(form)(x, bias)


@functools.cache
def _differentiable(form: str) -> Callable[[Any, Any], Any]:
    def backward(dy: Any, values: Any, wanted: Any) -> BiasGeluGrads:
        return bias_gelu_bwd(dy, *values, form=form, with_dbias=wanted[1])

    return keeping_inputs(functools.partial(bias_gelu_fwd, form=form), backward)


@checked
def bias_gelu_fwd(x: jax.Array, bias: jax.Array | None = None, *, form: str = "tanh") -> jax.Array:
    """Computes ``bias_gelu`` with the same arguments, but is not differentiable.

    x is [..., cols] float32, float16 or bfloat16, ``bias`` [cols] in x's dtype or None, ``form``
    "tanh" or "erf". The result has x's shape and dtype. Another dtype raises TypeError, another
    shape or form ValueError.
    """
    name = "bias_gelu_fwd"
    is_tanh = op_options.is_tanh(name, form)
    return run(_OP, name, {"x": x, "bias": bias}, is_tanh=is_tanh)["y"]


@checked
def bias_gelu_bwd(
    grad_output: jax.Array,
    x: jax.Array,
    bias: jax.Array | None = None,
    *,
    form: str = "tanh",
    with_dbias: bool = False,
) -> BiasGeluGrads:
    """Computes ``bias_gelu``'s gradients: grad_output * gelu'(x + bias) and its column sums.

    Args:
        grad_output: gradient of the output, in x's shape and dtype.
        x: [..., cols] float32, float16 or bfloat16.
        bias: [cols] in x's dtype; None adds nothing.
        form: "tanh" or "erf", as passed to ``bias_gelu``.
        with_dbias: also compute the bias's gradient, even if ``bias`` is None.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match, or ``form`` is not listed.
    """
    name = "bias_gelu_bwd"
    is_tanh = op_options.is_tanh(name, form)
    given = {"dy": grad_output, "x": x, "bias": bias}
    made = run(_OP, name, given, ["dbias"] * bool(with_dbias), is_tanh=is_tanh)
    return BiasGeluGrads(made["dx"], made.get("dbias"))


@checked
def bias_gelu_fwd_fp8(
    x: jax.Array,
    bias: jax.Array | None,
    scale: jax.Array,
    fp8_dtype: Any,
    *,
    form: str = "tanh",
    rowwise: bool = True,
    columnwise: bool = True,
    amax: jax.Array | None = None,
) -> FP8Output:
    """Quantizes the float32 result of GELU: q = saturating_cast(gelu(x + bias) * scale).

    Args:
        x: [..., cols] float32, float16 or bfloat16; rows is the product of all dimensions but the
            last.
        bias: [cols] in x's dtype; None adds nothing.
        scale: one float32 element.
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        form: "tanh" or "erf" (exact).
        rowwise, columnwise: the copies to make: [rows, cols], and its transpose [cols, rows].
        amax: one float32 element; the result's ``amax`` is then max(amax, max |result|), before
            scaling, where NaN counts as largest. None computes no amax.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match, ``form`` is not listed, or no copy is requested.
    """
    name = "bias_gelu_fwd_fp8"
    is_tanh = op_options.is_tanh(name, form)
    given = {"x": x, "bias": bias, "scale": scale, "amax": amax}
    return cast_of_activation(_OP, name, given, fp8_dtype, rowwise, columnwise, is_tanh=is_tanh)[0]


@checked
def bias_gelu_bwd_fp8(
    grad_output: jax.Array,
    x: jax.Array,
    bias: jax.Array | None,
    scale: jax.Array,
    fp8_dtype: Any,
    *,
    form: str = "tanh",
    rowwise: bool = True,
    columnwise: bool = True,
    amax: jax.Array | None = None,
    with_dbias: bool = False,
) -> BiasGeluFP8Grads:
    """Computes ``bias_gelu_bwd`` and quantizes the gradient of x from its float32 values.

    Args:
        grad_output: gradient of the output, in x's shape and dtype.
        x: [..., cols] float32, float16 or bfloat16; rows is the product of all dimensions but the
            last.
        bias: [cols] in x's dtype; None adds nothing.
        scale: one float32 element.
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        form: "tanh" or "erf", as passed to ``bias_gelu``.
        rowwise, columnwise: the copies to make: [rows, cols], and its transpose [cols, rows].
        amax: one float32 element; the result's ``amax`` is then max(amax, max |gradient|), before
            scaling, where NaN counts as largest. None computes no amax.
        with_dbias: also compute the bias's gradient, even if ``bias`` is None.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match, ``form`` is not listed, or no copy is requested.
    """
    name = "bias_gelu_bwd_fp8"
    is_tanh = op_options.is_tanh(name, form)
    given = {"dy": grad_output, "x": x, "bias": bias, "scale": scale, "amax": amax}
    made = cast_of_activation(
        _OP, name, given, fp8_dtype, rowwise, columnwise, with_dbias, is_tanh=is_tanh
    )
    return BiasGeluFP8Grads(*made)
