"""Gated activations act(gate) * up: SwiGLU, GeGLU, ReGLU and GLU."""

from __future__ import annotations

import functools
import math
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


def swiglu(input: jax.Array, *, activation: str = "silu", axis: int = -1) -> jax.Array:
    """Computes the gated activation act(gate) * up in float32, differentiably.

    Args:
        input: gate and up, gate first. float32, float16 or bfloat16. [..., 2F] side by side, or
            [..., 2, F], of which devices can share F.
        activation: "silu" (SwiGLU), "gelu" (GeGLU, tanh form), "gelu_erf", "relu" (ReGLU) or
            "sigmoid" (GLU).
        axis: -1 for [..., 2F], -2 for [..., 2, F].

    Returns:
        [..., F] in the input's dtype.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: a shape, activation or axis that does not match.
    """
    _code("swiglu_fwd", activation)
    return _differentiable(activation, axis)(input)


@functools.cache
def _differentiable(activation: str, axis: int) -> Callable[[Any], Any]:
    @jax.custom_vjp
    def gated(input: Any) -> Any:
        return swiglu_fwd(input, activation=activation, axis=axis)

    gated.defvjp(
        lambda x: (swiglu_fwd(x.value, activation=activation, axis=axis), x.value),
        lambda x, dy: (swiglu_bwd(materialised(dy), x, activation=activation, axis=axis),),
        symbolic_zeros=True,
    )
    return gated


def _halves(function: str, input: Any, axis: int) -> tuple[jax.Array, tuple[int, ...]]:
    """Returns gate and up with a dimension of rows at least, and the output's shape."""
    shape = jnp.shape(input)
    if axis == -1:
        rows = _checks.as_rows(function, "input", input)
        if shape[-1] % 2:
            raise ValueError(f"{function}: input must have an even last extent, got {shape[-1]}")
        return rows, (*shape[:-1], shape[-1] // 2)
    if axis != -2:
        raise ValueError(f"{function}: axis must be -1 or -2, got {axis}")
    if len(shape) < 2 or shape[-2] != 2:
        raise ValueError(f"{function}: input must have shape [..., 2, F], got {list(shape)}")
    rows = _checks.has_dtype(function, "input", input, _checks.FLOATS)
    return rows if rows.ndim > 2 else rows[None], (*shape[:-2], shape[-1])


def _rules(axis: int, rank: int) -> tuple[str, dict[str, Any]]:
    """Returns the dimensions of gate and up in a rule, and what devices may share of them."""
    if axis == -1:
        return "r c", {"split": "r", "ranks": {"r": rank - 1}}
    return "r g f", {"split": "r f", "ranks": {"r": rank - 2}}


def swiglu_fwd(input: jax.Array, *, activation: str = "silu", axis: int = -1) -> jax.Array:
    """Computes ``swiglu``, whose arguments it takes, without a gradient."""
    code = _code("swiglu_fwd", activation)
    halves, shape = _halves("swiglu_fwd", input, axis)

    def body(x: jax.Array) -> tuple[jax.Array]:
        x = x.reshape(x.shape[0], math.prod(x.shape[1:]))
        results = {"out": _S((x.shape[0], x.shape[1] // 2), x.dtype)}
        return (call("swiglu", "swiglu_fwd", results, input=x, activation=code)["out"],)

    dims, options = _rules(axis, halves.ndim)
    (out,) = rowwise("swiglu_fwd", f"input: {dims} -> out: r f", body, **options)(halves)
    return out.reshape(shape)


def swiglu_bwd(
    grad_output: jax.Array, input: jax.Array, *, activation: str = "silu", axis: int = -1
) -> jax.Array:
    """Computes the gradient of ``swiglu`` with respect to gate and up, of the input's shape.

    Args:
        grad_output: [..., F], gradient of the output.
        input, activation, axis: as in ``swiglu``.
    """
    code = _code("swiglu_bwd", activation)
    halves, shape = _halves("swiglu_bwd", input, axis)
    grad_output = _checks.has_dtype("swiglu_bwd", "grad_output", grad_output, [halves.dtype.name])
    grad_output = _checks.has_shape("swiglu_bwd", "grad_output", grad_output, shape)

    def body(dy: jax.Array, x: jax.Array) -> tuple[jax.Array]:
        flat = x.reshape(x.shape[0], math.prod(x.shape[1:]))
        results = {"grad_input": _S(flat.shape, x.dtype)}
        given = {"grad_output": dy, "input": flat, "activation": code}
        made = call("swiglu", "swiglu_bwd", results, **given)["grad_input"]
        return (made.reshape(x.shape),)

    dims, options = _rules(axis, halves.ndim)
    rule = f"grad_output: r f, input: {dims} -> grad_input: {dims}"
    whole = (*halves.shape[: options["ranks"]["r"]], shape[-1])
    (grad_input,) = rowwise("swiglu_bwd", rule, body, **options)(grad_output.reshape(whole), halves)
    return grad_input.reshape(jnp.shape(input))
