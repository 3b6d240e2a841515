"""Gated activations act(gate) * up: SwiGLU, GeGLU, ReGLU and others, also with a cast to FP8."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...runtime.op_options import ACTIVATIONS, ClampedSwiglu, gate_arguments
from . import _checks
from ._checked import checked
from ._gated_arrays import GatedArrays, call_gated, gated_arrays
from ._gradient import keeping_inputs
from .fp8_output import FP8Output

__all__ = [
    "ACTIVATIONS", "ClampedSwiglu", "SwigluFP8Grads", "SwigluGrads", "swiglu", "swiglu_bwd",
    "swiglu_bwd_fp8", "swiglu_fwd", "swiglu_fwd_fp8",
]  # fmt: skip


class SwigluGrads(NamedTuple):
    """Gradients of ``swiglu``.

    Attributes:
        input: gradient of ``input``, of its shape and dtype.
        up: gradient of ``up``; None if ``up`` was not given.
        dbias: gradients of the biases of gate and up, [2F], or [2, F] with axis -2; None if not
            requested.
    """

    input: jax.Array
    up: jax.Array | None
    dbias: jax.Array | None


class SwigluFP8Grads(NamedTuple):
    """Gradients of ``swiglu``, those of gate and up in FP8.

    Attributes:
        output: FP8 data of the gradients of gate and up, one matrix [M, 2F] with the gate's first.
            With axis -2 the rowwise copy is [..., 2, F], the columnwise copy [2, F, ...].
        dbias: gradients of the biases of gate and up, [2F], or [2, F] with axis -2; None if not
            requested.
    """

    output: FP8Output
    dbias: jax.Array | None


@checked
def swiglu(
    input: jax.Array,
    up: jax.Array | None = None,
    bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    *,
    activation: str | ClampedSwiglu = "silu",
    axis: int = -1,
) -> jax.Array:
    """Computes the gated activation act(gate) * up in float32, differentiably.

    Args:
        input: float32, float16 or bfloat16: gate and up concatenated, gate first, [..., 2F]; with
            ``up`` the gate alone, [..., F]; with ``axis`` -2 both as [..., 2, F].
        up: [..., F] in the input's dtype, or None; must be None with ``axis`` -2.
        bias, up_bias: added before the activation, in the input's dtype. Without ``up_bias``,
            ``bias`` is [2F] for gate and up, or [2, F] with ``axis`` -2; with it, each is [F]. None
            adds nothing.
        activation: "silu" (SwiGLU), "gelu" (GeGLU, tanh form), "gelu_erf", "relu" (ReGLU),
            "squared_relu", "sigmoid" (GLU), or a ``ClampedSwiglu``.
        axis: -1, or -2 for gate and up as [..., 2, F], whose F can be sharded.

    Returns:
        [..., F] in the input's dtype.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match, or ``activation`` or ``axis`` is not listed.
    """
    gate_arguments("swiglu_fwd", activation)
    return _differentiable(activation, axis)(input, up, bias, up_bias)


@functools.cache
def _differentiable(activation: str | ClampedSwiglu, axis: int) -> Callable[..., Any]:
    options: dict[str, Any] = {"activation": activation, "axis": axis}

    def backward(dy: Any, values: Any, wanted: Any) -> tuple[Any, ...]:
        x, up, bias, up_bias = values
        given = gated_arrays("swiglu_bwd", activation, axis, x, up, bias, up_bias, dy)
        made = _gradients(given, any(wanted[2:]))
        dbias, dup_bias = made.dbias, None
        if dbias is not None and up_bias is not None:
            dbias, dup_bias = jnp.split(dbias, 2)
        return made.input, made.up, dbias, dup_bias

    return keeping_inputs(functools.partial(swiglu_fwd, **options), backward)


@checked
def swiglu_fwd(
    input: jax.Array,
    up: jax.Array | None = None,
    bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    *,
    activation: str | ClampedSwiglu = "silu",
    axis: int = -1,
) -> jax.Array:
    """Computes ``swiglu`` with the same arguments, but is not differentiable.

    Args:
        input: float32, float16 or bfloat16: gate and up concatenated, gate first, [..., 2F]; with
            ``up`` the gate alone, [..., F]; with ``axis`` -2 both as [..., 2, F].
        up: [..., F] in the input's dtype, or None; must be None with ``axis`` -2.
        bias, up_bias, activation, axis: as in ``swiglu``.

    Returns:
        [..., F] in the input's dtype.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match, or ``activation`` or ``axis`` is not listed.
    """
    given = gated_arrays("swiglu_fwd", activation, axis, input, up, bias, up_bias)
    return call_gated(given, {"out": "r f"})["out"].reshape(given.shape)


@checked
def swiglu_fwd_fp8(
    input: jax.Array,
    up: jax.Array | None,
    scale: jax.Array,
    fp8_dtype: Any,
    *,
    bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    activation: str | ClampedSwiglu = "silu",
    axis: int = -1,
    rowwise: bool = True,
    columnwise: bool = True,
    amax: jax.Array | None = None,
) -> FP8Output:
    """Computes ``swiglu`` and quantizes its float32 result y: q = saturating_cast(y * scale).

    Args:
        input: float32, float16 or bfloat16: gate and up concatenated, gate first, [..., 2F]; with
            ``up`` the gate alone, [..., F]; with ``axis`` -2 both as [..., 2, F].
        up: [..., F] in the input's dtype, or None; must be None with ``axis`` -2.
        scale: one float32 element.
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        bias, up_bias, activation, axis: as in ``swiglu``.
        rowwise, columnwise: the copies to make: [M, F], and its transpose [F, M]; M is the product
            of the leading dimensions. With ``axis`` -2 they are [..., F] and [F, ...].
        amax: one float32 element; the result's ``amax`` is then max(amax, max |y|), before scaling,
            where NaN counts as largest. None computes no amax.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or option does not match, or neither a copy nor an amax is requested.
    """
    given = gated_arrays("swiglu_fwd_fp8", activation, axis, input, up, bias, up_bias, to_fp8=True)
    sides = {"rowwise": "r f" if rowwise else None, "columnwise": "f r" if columnwise else None}
    return _run_to_fp8(given, sides, scale, fp8_dtype, amax, False)[0]


@checked
def swiglu_bwd(
    grad_output: jax.Array,
    input: jax.Array,
    up: jax.Array | None = None,
    bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    *,
    activation: str | ClampedSwiglu = "silu",
    axis: int = -1,
    with_dbias: bool = False,
) -> jax.Array | SwigluGrads:
    """Computes the gradients of ``swiglu`` with respect to gate, up and biases.

    Args:
        grad_output: [..., F], gradient of the output, in the input's dtype.
        input: float32, float16 or bfloat16: gate and up concatenated, gate first, [..., 2F]; with
            ``up`` the gate alone, [..., F]; with ``axis`` -2 both as [..., 2, F].
        up: [..., F] in the input's dtype, or None; must be None with ``axis`` -2.
        bias, up_bias, activation, axis: as passed to ``swiglu``.
        with_dbias: also return the gradients of the biases, even without biases.

    Returns:
        A ``SwigluGrads``; but the gradient of ``input`` alone if ``up`` is None and ``with_dbias``
        is False.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match, or ``activation`` or ``axis`` is not listed.
    """
    given = gated_arrays("swiglu_bwd", activation, axis, input, up, bias, up_bias, grad_output)
    made = _gradients(given, with_dbias)
    return made.input if up is None and not with_dbias else made


@checked
def swiglu_bwd_fp8(
    grad_output: jax.Array,
    input: jax.Array,
    up: jax.Array | None,
    scale: jax.Array,
    fp8_dtype: Any,
    *,
    bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    activation: str | ClampedSwiglu = "silu",
    axis: int = -1,
    rowwise: bool = True,
    columnwise: bool = True,
    amax: jax.Array | None = None,
    with_dbias: bool = False,
) -> SwigluFP8Grads:
    """Computes ``swiglu_bwd`` and quantizes the float32 gradients as one matrix [M, 2F].

    The matrix has the gradient of the gate in its first F columns and that of up in its last F,
    even if gate and up are two arrays. M is the product of the leading dimensions.

    Args:
        grad_output: [..., F], gradient of the output, in the input's dtype.
        input: float32, float16 or bfloat16: gate and up concatenated, gate first, [..., 2F]; with
            ``up`` the gate alone, [..., F]; with ``axis`` -2 both as [..., 2, F].
        up: [..., F] in the input's dtype, or None; must be None with ``axis`` -2.
        scale: one float32 element.
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        bias, up_bias, activation, axis: as passed to ``swiglu``.
        rowwise, columnwise: the copies to make: [M, 2F], and its transpose [2F, M]. With ``axis``
            -2 they are [..., 2, F] and [2, F, ...].
        amax: one float32 element; the result's ``amax`` is then max(amax, max |gradient|), before
            scaling, where NaN counts as largest. None computes no amax.
        with_dbias: also return the gradients of the biases, even without biases.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or option does not match, or neither a copy nor an amax is requested.
    """
    given = gated_arrays(
        "swiglu_bwd_fp8", activation, axis, input, up, bias, up_bias, grad_output, to_fp8=True
    )
    row, column = ("r g f", "g f r") if axis == -2 else ("r c", "c r")
    sides = {"rowwise": row if rowwise else None, "columnwise": column if columnwise else None}
    output, dbias = _run_to_fp8(given, sides, scale, fp8_dtype, amax, with_dbias)
    return SwigluFP8Grads(output, given.bias_gradient(dbias))


def _gradients(given: GatedArrays, with_dbias: bool) -> SwigluGrads:
    """Computes the gradients of the inputs, and those of the biases if they are wanted."""
    results = {"grad_input": given.dims["input"]}
    results |= {"grad_up": "r f"} if "up" in given.arrays else {}
    results |= {"dbias": f"+ {given.bias_dims}"} if with_dbias else {}
    made = call_gated(given, results)
    lead, last = given.shape[:-1], given.shape[-1]
    whole = (*lead, last) if "up" in given.arrays else (*lead, 2 * last)
    whole = whole if given.is_flat else (*lead, 2, last)
    up = made["grad_up"].reshape(whole) if "grad_up" in made else None
    return SwigluGrads(
        made["grad_input"].reshape(whole), up, given.bias_gradient(made.get("dbias"))
    )


def _run_to_fp8(
    given: GatedArrays,
    sides: Mapping[str, str | None],
    scale: Any,
    fp8_dtype: Any,
    amax: Any,
    with_dbias: bool,
) -> tuple[FP8Output, jax.Array | None]:
    """Calls a function with FP8 output and returns the FP8 data and the bias gradient or None."""
    name = given.function
    dtype = _checks.fp8_dtype_of(name, fp8_dtype)
    if amax is None and not any(sides.values()):
        raise ValueError(f"{name}: rowwise or columnwise must be True, got False for both")
    extra = {"scale": _checks.is_scalar(name, "scale", scale)}
    results = {side: dims for side, dims in sides.items() if dims} | {"scale_inv": "_"}
    if amax is not None:
        extra["amax"] = _checks.is_scalar(name, "amax", amax)
        results["amax"] = "^"
    if with_dbias:
        results["dbias"] = f"+ {given.bias_dims}"
    out = call_gated(given, results, extra, dtype)
    return FP8Output(*(out.get(each) for each in FP8Output._fields)), out.get("dbias")
