"""Gated activations act(gate) * up: SwiGLU, GeGLU, ReGLU and GLU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._call import call
from . import _checks
from ._gradient import materialised
from ._rows import rowwise

__all__ = ["ACTIVATIONS", "swiglu", "swiglu_bwd", "swiglu_fwd"]

# Names of act and its number in csrc/common/activation/functions.h.
ACTIVATIONS = {"silu": 5, "gelu": 0, "gelu_erf": 1, "relu": 3, "sigmoid": 6}
_S = jax.ShapeDtypeStruct


def _code(function: str, activation: str) -> int:
    """Returns the kernels' number of an activation; raises ValueError if there is none."""
    code = ACTIVATIONS.get(activation)
    if code is None:
        raise ValueError(
            f"{function}: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}"
        )
    return code


def swiglu(input: jax.Array, *, activation: str = "silu") -> jax.Array:
    """Computes the gated activation act(gate) * up in float32, differentiably.

    Args:
        input: gate and up side by side, [..., 2F], gate first. float32, float16 or bfloat16.
        activation: "silu" (SwiGLU), "gelu" (GeGLU, tanh form), "gelu_erf", "relu" (ReGLU) or
            "sigmoid" (GLU).

    Returns:
        [..., F] in the input's dtype.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: a shape or activation that does not match.
    """
    _code("swiglu_fwd", activation)
    return _differentiable(activation)(input)


@functools.cache
def _differentiable(activation: str) -> Callable[[Any], Any]:
    @jax.custom_vjp
    def gated(input: Any) -> Any:
        return swiglu_fwd(input, activation=activation)

    gated.defvjp(
        lambda x: (swiglu_fwd(x.value, activation=activation), x.value),
        lambda x, dy: (swiglu_bwd(materialised(dy), x, activation=activation),),
        symbolic_zeros=True,
    )
    return gated


def _matrix(function: str, input: Any) -> jax.Array:
    rows = _checks.as_matrix(function, "input", input)
    if rows.shape[1] % 2:
        raise ValueError(f"{function}: input must have an even last extent, got {rows.shape[1]}")
    return rows


def swiglu_fwd(input: jax.Array, *, activation: str = "silu") -> jax.Array:
    """Computes ``swiglu``, whose arguments it takes, without a gradient."""
    code = _code("swiglu_fwd", activation)
    rows = _matrix("swiglu_fwd", input)

    def body(x: jax.Array) -> tuple[jax.Array]:
        results = {"out": _S((x.shape[0], x.shape[1] // 2), x.dtype)}
        return (call("swiglu", "swiglu_fwd", results, input=x, activation=code)["out"],)

    (out,) = rowwise("swiglu_fwd", "input: r c -> out: r h", body)(rows)
    return out.reshape(*jnp.shape(input)[:-1], out.shape[1])


def swiglu_bwd(grad_output: jax.Array, input: jax.Array, *, activation: str = "silu") -> jax.Array:
    """Computes the gradient of ``swiglu`` with respect to gate and up, side by side.

    Args:
        grad_output: [..., F], gradient of the output.
        input, activation: as in ``swiglu``.
    """
    code = _code("swiglu_bwd", activation)
    rows = _matrix("swiglu_bwd", input)
    grad_output = _checks.has_dtype("swiglu_bwd", "grad_output", grad_output, [rows.dtype.name])
    shape = (*jnp.shape(input)[:-1], rows.shape[1] // 2)
    grad_output = _checks.has_shape("swiglu_bwd", "grad_output", grad_output, shape)

    def body(dy: jax.Array, x: jax.Array) -> tuple[jax.Array]:
        results = {"grad_input": _S(x.shape, x.dtype)}
        given = {"grad_output": dy, "input": x, "activation": code}
        return (call("swiglu", "swiglu_bwd", results, **given)["grad_input"],)

    rule = "grad_output: r h, input: r c -> grad_input: r c"
    dy = grad_output.reshape(rows.shape[0], rows.shape[1] // 2)
    (grad_input,) = rowwise("swiglu_bwd", rule, body)(dy, rows)
    return grad_input.reshape(jnp.shape(input))
