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
    """Applies an activation function to every element, differentiably, in float32 arithmetic.

    ``kind`` is one of ``KINDS``.
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
    """Computes ``activation`` with the same arguments, but is not differentiable."""
    number = activation_number("activation_fwd", kind)
    return run("activation", "activation_fwd", {"x": x}, kind=number)["y"]


@checked
def activation_bwd(grad_output: jax.Array, x: jax.Array, kind: str) -> jax.Array:
    """Computes the gradient with respect to x, grad_output * f'(x)."""
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

    The last dimension of x are the columns.
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
    """Quantizes the float32 gradient that ``activation_bwd`` computes, as
    ``activation_fwd_fp8``.
    """
    name = "activation_bwd_fp8"
    number = activation_number(name, kind)
    given = {"dy": grad_output, "x": x, "scale": scale, "amax": amax}
    return cast_of_activation(
        "activation", name, given, fp8_dtype, rowwise, columnwise, kind=number
    )[0]
