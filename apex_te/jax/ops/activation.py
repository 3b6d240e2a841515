"""Elementwise activation functions, forward and backward, also with a fused cast to FP8."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from ...runtime.op_options import KINDS, activation_number
from ._checked import checked
from ._contract import run
from ._gradient import keeping_inputs
from .fp8_output import FP8Output, cast_of_activation

__all__ = [
    "KINDS", "activation", "activation_bwd", "activation_bwd_fp8", "activation_fwd",
    "activation_fwd_fp8",
]  # fmt: skip


@checked
def activation(x: jax.Array, kind: str) -> jax.Array:
    """Applies an activation function to every element in float32 arithmetic, differentiably.

    Args:
        x: any shape, float32, float16 or bfloat16.
        kind: "gelu" (tanh form), "gelu_erf" (exact), "quick_gelu" (x sigmoid(1.702 x)), "relu",
            "squared_relu" or "silu".

    Returns:
        An array of x's shape and dtype.

    Raises:
        TypeError: x has a dtype that is not listed.
        ValueError: ``kind`` is not listed.
    """
    activation_number("activation_fwd", kind)
    return _differentiable(kind)(x)


@functools.cache
def _differentiable(kind: str) -> Callable[[Any], Any]:
    def backward(dy: Any, values: Any, wanted: Any) -> tuple[Any]:
        return (activation_bwd(dy, values[0], kind),)

    return keeping_inputs(functools.partial(activation_fwd, kind=kind), backward)


@checked
def activation_fwd(x: jax.Array, kind: str) -> jax.Array:
    """Computes ``activation`` with the same arguments, but is not differentiable.

    x is float32, float16 or bfloat16 of any shape, which the result has, too. Another dtype raises
    TypeError, an unknown ``kind`` ValueError.
    """
    number = activation_number("activation_fwd", kind)
    return run("activation", "activation_fwd", {"x": x}, kind=number)["y"]


@checked
def activation_bwd(grad_output: jax.Array, x: jax.Array, kind: str) -> jax.Array:
    """Computes the gradient with respect to x, grad_output * f'(x).

    Args:
        grad_output: gradient of the output, in x's shape and dtype.
        x: the input of ``activation``, any shape, float32, float16 or bfloat16.
        kind: as passed to ``activation``.

    Returns:
        An array of x's shape and dtype.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match, or ``kind`` is unknown.
    """
    number = activation_number("activation_bwd", kind)
    given = {"dy": grad_output, "x": x}
    return run("activation", "activation_bwd", given, kind=number)["dx"]


@checked
def activation_fwd_fp8(
    x: jax.Array,
    kind: str,
    scale: jax.Array,
    fp8_dtype: Any,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    amax: jax.Array | None = None,
) -> FP8Output:
    """Quantizes an activation's float32 result f(x): q = saturating_cast(f(x) * scale).

    Args:
        x: [..., cols] float32, float16 or bfloat16; rows is the product of all dimensions but the
            last.
        kind: as in ``activation``.
        scale: one float32 element.
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        rowwise, columnwise: the copies to make: [rows, cols], and its transpose [cols, rows].
        amax: one float32 element; the result's ``amax`` is then max(amax, max |f(x)|), before
            scaling, where NaN counts as largest. None computes no amax.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match, ``kind`` is unknown, or no copy is requested.
    """
    name = "activation_fwd_fp8"
    number = activation_number(name, kind)
    given = {"x": x, "scale": scale, "amax": amax}
    return cast_of_activation(
        "activation", name, given, fp8_dtype, rowwise, columnwise, kind=number
    )[0]


@checked
def activation_bwd_fp8(
    grad_output: jax.Array,
    x: jax.Array,
    kind: str,
    scale: jax.Array,
    fp8_dtype: Any,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    amax: jax.Array | None = None,
) -> FP8Output:
    """Computes ``activation_bwd`` and quantizes the gradient, which stays float32 until the cast.

    Args:
        grad_output: gradient of the output, in x's shape and dtype.
        x: [..., cols] float32, float16 or bfloat16; rows is the product of all dimensions but the
            last.
        kind: as passed to ``activation``.
        scale: one float32 element.
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        rowwise, columnwise: the copies to make: [rows, cols], and its transpose [cols, rows].
        amax: one float32 element; the result's ``amax`` is then max(amax, max |gradient|), before
            scaling, where NaN counts as largest. None computes no amax.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match, ``kind`` is unknown, or no copy is requested.
    """
    name = "activation_bwd_fp8"
    number = activation_number(name, kind)
    given = {"dy": grad_output, "x": x, "scale": scale, "amax": amax}
    return cast_of_activation(
        "activation", name, given, fp8_dtype, rowwise, columnwise, kind=number
    )[0]
