"""Softmax of scaled attention scores, optionally masked or causal, in one pass over memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._call import call
from . import _checks
from ._checked import checked
from ._gradient import materialised
from ._rows import rowwise

__all__ = ["scaled_softmax", "scaled_softmax_bwd", "scaled_softmax_fwd"]

_CAUSAL = {None: 0, "upper_left": 1, "bottom_right": 2}
# Dimensions: batch, heads, queries and columns; and those of extent 1 in their place.
_DIMS = {4: "rhqc", 3: "rqc"}
_BROADCAST = {"r": "1", "h": "g", "q": "p"}
_S = jax.ShapeDtypeStruct


@checked
def scaled_softmax(
    x: jax.Array, scale: float, mask: jax.Array | None = None, *, causal: str | None = None
) -> jax.Array:
    """Computes softmax(scale * x) over the visible elements of the last dimension, 0 elsewhere.

    Differentiable with respect to x. Elements that ``mask`` or ``causal`` hides have no influence,
    even if they are NaN. Arithmetic is in float32. The result and gradient of a row are zero if it
    has no visible elements or all of them are -Inf. A visible NaN or +Inf (-Inf with a negative
    scale) makes all visible elements of the row NaN.

    Other arguments and errors are as in ``apex_te.ops.scaled_softmax.scaled_softmax``.

    Args:
        x: [B, H, Sq, Sk] or [N, Sq, Sk] float32, float16 or bfloat16.

    Returns:
        An array of x's shape and dtype; no other array is kept for backward.
    """
    _causal_mode("scaled_softmax_fwd", causal)
    return _differentiable(float(scale), causal)(x, mask)


@functools.lru_cache(maxsize=256)
def _differentiable(scale: float, causal: str | None) -> Callable[..., Any]:
    @jax.custom_vjp
    def softmax(x: Any, mask: Any) -> Any:
        return scaled_softmax_fwd(x, scale, mask, causal=causal)

    def fwd(x: Any, mask: Any) -> tuple[Any, Any]:
        y = softmax(x.value, None if mask is None else mask.value)
        return y, y

    def bwd(y: Any, dy: Any) -> Any:
        return scaled_softmax_bwd(materialised(dy), y, scale, causal=causal), None

    softmax.defvjp(fwd, bwd, symbolic_zeros=True)
    return softmax


@checked
def scaled_softmax_fwd(
    x: jax.Array, scale: float, mask: jax.Array | None = None, *, causal: str | None = None
) -> jax.Array:
    """Computes ``scaled_softmax`` with the same arguments, but is not differentiable."""
    name = "scaled_softmax_fwd"
    mode = _causal_mode(name, causal)
    x = _scores(name, "x", x)
    if mask is not None:
        mask = _checked_mask(name, mask, x)
    _check_causal(name, "x", x, mode)
    inputs = {"x": x} if mask is None else {"x": x, "mask": mask}

    def body(*arrays: jax.Array) -> tuple[jax.Array]:
        given = dict(zip(inputs, arrays, strict=True))
        results = {"y": _S(given["x"].shape, x.dtype)}
        options = {"scale": float(scale), "causal": mode}
        return (call("scaled_softmax", name, results, **given, **options)["y"],)

    dims = _DIMS[x.ndim]
    rule = f"x: {' '.join(dims)} -> y: {' '.join(dims)}"
    if mask is not None:
        # Of a dimension that the mask has not, devices that share it have the mask whole.
        extents = zip(dims, mask.shape, x.shape, strict=True)
        own = [each if extent == of_x else _BROADCAST[each] for each, extent, of_x in extents]
        rule = rule.replace(" ->", f", mask: {' '.join(own)} ->")
    (y,) = rowwise(name, rule, body, split="r h")(*inputs.values())
    return y


@checked
def scaled_softmax_bwd(
    dy: jax.Array, y: jax.Array, scale: float, *, causal: str | None = None
) -> jax.Array:
    """Computes the gradient with respect to x from the output y: scale * y * (dy - sum(dy * y)).

    No mask is needed: an element with y = 0 has gradient 0 for any dy.

    Arguments, results and errors are those of ``apex_te.ops.scaled_softmax.scaled_softmax_bwd``.
    """
    name = "scaled_softmax_bwd"
    mode = _causal_mode(name, causal)
    dy = _scores(name, "dy", dy)
    y = _checks.same_shape(name, "y", y, dy)
    _check_causal(name, "dy", dy, mode)

    def body(dy: jax.Array, y: jax.Array) -> tuple[jax.Array]:
        results = {"dx": _S(dy.shape, dy.dtype)}
        options = {"scale": float(scale), "causal": mode}
        return (call("scaled_softmax", name, results, dy=dy, y=y, **options)["dx"],)

    dims = " ".join(_DIMS[dy.ndim])
    rule = f"dy: {dims}, y: {dims} -> dx: {dims}"
    (dx,) = rowwise(name, rule, body, split="r h")(dy, y)
    return dx


def _causal_mode(function: str, causal: str | None) -> int:
    """Returns the kernels' number of a value of ``causal``; ValueError if there is none."""
    if causal not in _CAUSAL:
        raise ValueError(
            f"{function}: causal must be None, 'upper_left' or 'bottom_right', got {causal!r}"
        )
    return _CAUSAL[causal]


def _scores(function: str, name: str, value: Any) -> jax.Array:
    """Returns ``value``, an array of three or four dimensions."""
    found = _checks.has_dtype(function, name, value, _checks.FLOATS)
    if found.ndim not in (3, 4):
        raise ValueError(f"{function}: {name} must have 4 dimensions, got {list(found.shape)}")
    return found


def _check_causal(function: str, name: str, x: jax.Array, mode: int) -> None:
    """Checks that there are as many rows as columns where the upper left corner is meant."""
    if mode == 1 and x.shape[-2] != x.shape[-1]:
        raise ValueError(
            f"{function}: {name} must have as many rows as columns to be causal from the upper"
            f" left, got shape {list(x.shape)}"
        )


def _checked_mask(function: str, value: Any, x: jax.Array) -> jax.Array:
    """Returns a mask, whose last dimension is broadcast to that of x; others may have extent 1."""
    mask = _checks.has_ndim(function, "mask", value, x.ndim, ["bool"])
    if any(own not in (1, extent) for own, extent in zip(mask.shape, x.shape, strict=True)):
        raise ValueError(
            f"{function}: mask must broadcast over any dimension but the last to"
            f" {list(x.shape)}, got {list(mask.shape)}"
        )
    return jnp.broadcast_to(mask, (*mask.shape[:-1], x.shape[-1]))
