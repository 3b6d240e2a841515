"""Elementwise activation functions, forward and backward, also with a fused cast to FP8."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...runtime.op_options import KINDS, activation_number
from .._call import call
from . import _checks
from ._checked import checked
from ._gradient import materialised
from ._rows import rowwise as over_rows
from .fp8_output import FP8Output, fused_cast

__all__ = [
    "KINDS",
    "activation",
    "activation_bwd",
    "activation_bwd_fp8",
    "activation_fwd",
    "activation_fwd_fp8",
]

_S = jax.ShapeDtypeStruct


@checked
def activation(x: jax.Array, kind: str) -> jax.Array:
    """Applies an activation function to every element, differentiably, in float32 arithmetic.

    Other arguments and errors are as in ``apex_te.ops.activation.activation``.

    Args:
        x: one dimension or more, float32, float16 or bfloat16.
        kind: one of ``KINDS``.
    """
    activation_number("activation_fwd", kind)
    return _differentiable(kind)(x)


@functools.cache
def _differentiable(kind: str) -> Callable[[Any], Any]:
    @jax.custom_vjp
    def act(x: Any) -> Any:
        return activation_fwd(x, kind)

    act.defvjp(
        lambda x: (activation_fwd(x.value, kind), x.value),
        lambda x, dy: (activation_bwd(materialised(dy), x, kind),),
        symbolic_zeros=True,
    )
    return act


@checked
def activation_fwd(x: jax.Array, kind: str) -> jax.Array:
    """Computes ``activation`` with the same arguments, but is not differentiable."""
    number = activation_number("activation_fwd", kind)
    rows = _checks.as_rows("activation_fwd", "x", x)

    def body(x: jax.Array) -> tuple[jax.Array]:
        made = call("activation", "activation_fwd", {"y": _S(x.shape, x.dtype)}, x=x, kind=number)
        return (made["y"],)

    ranks = {"r": rows.ndim - 1}
    run = over_rows("activation_fwd", "x: r c -> y: r c", body, split="r c", ranks=ranks)
    (y,) = run(rows)
    return y.reshape(jnp.shape(x))


@checked
def activation_bwd(grad_output: jax.Array, x: jax.Array, kind: str) -> jax.Array:
    """Computes the gradient with respect to x, grad_output * f'(x).

    Args:
        grad_output: gradient of the output, of x's shape and dtype.
        x, kind: as in ``activation``.
    """
    number = activation_number("activation_bwd", kind)
    rows = _checks.as_rows("activation_bwd", "x", x)
    dy = _checks.same_shape("activation_bwd", "dy", grad_output, jnp.asarray(x))

    def body(dy: jax.Array, x: jax.Array) -> tuple[jax.Array]:
        results = {"dx": _S(x.shape, x.dtype)}
        return (call("activation", "activation_bwd", results, dy=dy, x=x, kind=number)["dx"],)

    rule, ranks = "dy: r c, x: r c -> dx: r c", {"r": rows.ndim - 1}
    run = over_rows("activation_bwd", rule, body, split="r c", ranks=ranks)
    (dx,) = run(dy.reshape(rows.shape), rows)
    return dx.reshape(jnp.shape(x))


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

    Other arguments and errors are as in ``apex_te.ops.activation.activation_fwd_fp8``.

    Args:
        x, kind: as in ``activation``. x is read as a matrix [rows, cols], with its last dimension
            as columns.
        amax: one float32 element or None; the result's ``amax`` is the maximum of it and
            max |f(x)|.
    """
    name = "activation_fwd_fp8"
    options = {"kind": activation_number(name, kind)}
    inputs = {"x": _checks.as_matrix(name, "x", x)}
    return fused_cast(
        "activation", name, inputs, options, scale, fp8_dtype, rowwise, columnwise, amax
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
    """Quantizes the float32 gradient that ``activation_bwd`` computes.

    Args:
        grad_output: gradient of the output, of x's shape and dtype.
        x, kind, scale, fp8_dtype, rowwise, columnwise, amax: as in ``activation_fwd_fp8``.
    """
    name = "activation_bwd_fp8"
    options = {"kind": activation_number(name, kind)}
    rows = _checks.as_matrix(name, "x", x)
    dy = _checks.same_shape(name, "dy", grad_output, jnp.asarray(x)).reshape(rows.shape)
    inputs = {"dy": dy, "x": rows}
    return fused_cast(
        "activation", name, inputs, options, scale, fp8_dtype, rowwise, columnwise, amax
    )[0]
