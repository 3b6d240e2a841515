"""Softmax of scaled attention scores, optionally masked or causal, in one pass over memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from . import _checks
from ._checked import checked
from ._contract import run
from ._gradient import materialised, values_of

__all__ = ["scaled_softmax", "scaled_softmax_bwd", "scaled_softmax_fwd"]

_CAUSAL = {None: 0, "upper_left": 1, "bottom_right": 2}
_DIMS = "rhqc"  # batch, heads, queries, columns
_BROADCAST = {"r": "1", "h": "g", "q": "p"}  # dimensions of extent 1 in their place


@checked
def scaled_softmax(
    x: jax.Array, scale: float, mask: jax.Array | None = None, *, causal: str | None = None
) -> jax.Array:
    """Computes softmax(scale * x) over the visible elements of the last dimension, 0 elsewhere.

    A row without visible elements gives zeros. It is differentiable with respect to x; only the
    result is kept for backward.

    Args:
        x: [B, H, Sq, Sk] or [N, Sq, Sk] float32, float16 or bfloat16.
        scale: factor of x.
        mask: bool, True = hidden, with as many dimensions as x, each of x's size or 1 (broadcast).
            None hides nothing.
        causal: "upper_left" hides column > row, and needs Sq == Sk; "bottom_right" hides column >
            row + Sk - Sq; None hides nothing.

    Returns:
        An array of x's shape and dtype.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match, or ``causal`` is not listed.
    """
    _causal_mode("scaled_softmax_fwd", causal)
    return _differentiable(float(scale), causal)(x, mask)


@functools.lru_cache(maxsize=256)
def _differentiable(scale: float, causal: str | None) -> Callable[..., Any]:
    @jax.custom_vjp
    def softmax(x: Any, mask: Any) -> Any:
        return scaled_softmax_fwd(x, scale, mask, causal=causal)

    def fwd(x: Any, mask: Any) -> tuple[Any, Any]:
        y = softmax(*values_of((x, mask)))
        return y, y

    def bwd(y: Any, dy: Any) -> Any:
        return scaled_softmax_bwd(materialised(dy), y, scale, causal=causal), None

    softmax.defvjp(fwd, bwd, symbolic_zeros=True)
    return softmax


@checked
def scaled_softmax_fwd(
    x: jax.Array, scale: float, mask: jax.Array | None = None, *, causal: str | None = None
) -> jax.Array:
    """Computes ``scaled_softmax`` with the same arguments, but is not differentiable.

    x is [B, H, Sq, Sk] or [N, Sq, Sk] float32, float16 or bfloat16, as is the result; ``mask`` and
    ``causal`` are as in ``scaled_softmax``. Another dtype raises TypeError, another shape or option
    ValueError.
    """
    name = "scaled_softmax_fwd"
    mode = _causal_mode(name, causal)
    x = _scores(name, "x", x)
    if mask is not None:
        mask = _checked_mask(name, mask, x)
    _check_causal(name, "x", x, mode)
    given, shape = {"x": _four(x), "mask": None if mask is None else _four(mask)}, x.shape
    own = ""
    if given["mask"] is not None:
        # Of a dimension that the mask has not, devices that share it have the mask whole.
        extents = zip(_DIMS, given["mask"].shape, given["x"].shape, strict=True)
        own = " ".join(each if n == of_x else _BROADCAST[each] for each, n, of_x in extents)
    made = run("scaled_softmax", name, given, dims={"mask": own}, scale=float(scale), causal=mode)
    return made["y"].reshape(shape)


def _four(x: jax.Array) -> jax.Array:
    """Returns scores or a mask as [B, H, Sq, Sk]; three dimensions are those of one batch."""
    return x if x.ndim == 4 else x[None]


@checked
def scaled_softmax_bwd(
    dy: jax.Array, y: jax.Array, scale: float, *, causal: str | None = None
) -> jax.Array:
    """Computes the gradient of x from the output y: scale * y * (dy - sum(dy * y)).

    No mask is needed: an element with y = 0 has gradient 0 for any dy.

    Args:
        dy: gradient of the output, in y's shape and dtype.
        y: output of ``scaled_softmax``, [B, H, Sq, Sk] or [N, Sq, Sk] float32, float16 or bfloat16.
        scale: factor of x in the forward.
        causal: "upper_left", "bottom_right" or None, as passed to ``scaled_softmax``.

    Returns:
        An array of y's shape and dtype.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match, or ``causal`` is not listed.
    """
    name = "scaled_softmax_bwd"
    mode = _causal_mode(name, causal)
    dy = _scores(name, "dy", dy)
    y = _checks.same_shape(name, "y", y, dy)
    _check_causal(name, "dy", dy, mode)

    given = {"dy": _four(dy), "y": _four(y)}
    made = run("scaled_softmax", name, given, scale=float(scale), causal=mode)
    return made["dx"].reshape(dy.shape)


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
