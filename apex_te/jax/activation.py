"""Activation functions of a layer's columns, by Transformer Engine's names of one or several."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .ops import activation as single
from .ops.swiglu import ACTIVATIONS, ClampedSwiglu, swiglu
from .quantize import refuse

__all__ = ["activation"]

Function = Callable[[jax.Array], jax.Array]
Params = Mapping[str, float] | ClampedSwiglu | None
_CLAMPED = ("clamped_silu", "clamped_linear")
# gate * sigmoid(1.702 gate) * up, of halves that are not clamped.
_QUICK_GEGLU = ClampedSwiglu(math.inf, 1.702, 0.0)


def activation(
    x: jax.Array, activation_type: Sequence[str | Function], quantizer: None = None,
    act_params: Params = None,
) -> jax.Array:  # fmt: skip
    """Applies one function to each part of an array, and multiplies the results; differentiable.

    Args:
        x: [..., parts, F] float32, float16 or bfloat16, with as many parts as functions.
        activation_type: a name, or names: "gelu" (with tanh), "gelu_erf", "quick_gelu", "relu",
            "squared_relu", "silu", "sigmoid" and others of ``jax.nn``; "linear" for no function;
            or functions. One name with "linear", and ("clamped_silu", "clamped_linear"), are
            computed in one pass; "linear" may also be the first, the gate always is.
        quantizer: must be None.
        act_params: "limit", "alpha" and "glu_linear_offset" of ("clamped_silu",
            "clamped_linear"), or a ``ClampedSwiglu``; None: 7, 1.702 and 1.

    Returns:
        [..., F] in x's dtype.

    Raises:
        ValueError: a name is unknown, or ``x`` has another number of parts.
        TypeError: ``act_params`` has other keys, or ``x`` a dtype that is not listed.
        NotImplementedError: ``quantizer`` is not None.
    """
    refuse("activation", quantizer=quantizer)
    names = ordered("activation", activation_type)
    if jnp.ndim(x) < 2 or x.shape[-2] != len(names):
        raise ValueError(
            f"activation: x must have shape [..., {len(names)}, F], got {list(jnp.shape(x))}"
        )
    return activated("activation", x, names, act_params)


def ordered(owner: str, names: Any) -> tuple[Any, ...]:
    """Returns the functions' names as a tuple, with the gate first."""
    found = (names,) if isinstance(names, str) or callable(names) else tuple(names)
    if not found:
        raise ValueError(f"{owner}: activations must name a function, got {found}")
    found = tuple(name.lower() if isinstance(name, str) else name for name in found)
    return found[::-1] if found[0] in ("linear", _CLAMPED[1]) else found


def gate_of(owner: str, names: tuple[Any, ...], params: Any = None) -> str | ClampedSwiglu | None:
    """Returns the gated activation that the ops compute in one pass, None for other functions."""
    if names == _CLAMPED:
        if isinstance(params, ClampedSwiglu):
            return params
        given = dict(params or {})
        keys = {"limit": "limit", "alpha": "alpha", "glu_linear_offset": "offset"}
        if not keys.keys() >= given.keys():
            raise TypeError(f"{owner}: act_params must have keys of {[*keys]}, got {[*given]}")
        return ClampedSwiglu(**{keys[key]: value for key, value in given.items()})
    if len(names) != 2 or names[1] != "linear":
        return None
    if names[0] == "quick_gelu":
        return _QUICK_GEGLU
    return names[0] if names[0] in ACTIVATIONS else None


def activated(owner: str, x: jax.Array, names: tuple[Any, ...], params: Any = None) -> jax.Array:
    """Applies functions in the order of ``ordered`` to [..., parts, F]; see ``activation``."""
    gate = gate_of(owner, names, params)
    if gate is not None:
        return swiglu(x, activation=gate, axis=-2)
    parts = [_applied(owner, name, x[..., i, :], names) for i, name in enumerate(names)]
    return functools.reduce(operator.mul, parts)


def _applied(owner: str, name: Any, x: jax.Array, names: tuple[Any, ...]) -> jax.Array:
    """Applies one function, given by name or itself."""
    if name == "linear":
        return x
    if name in single.KINDS:
        return single.activation(x, name)
    function = name if callable(name) else getattr(jax.nn, str(name), None)
    if not callable(function) or name in _CLAMPED:
        raise ValueError(
            f"{owner}: activations must be one of {', '.join(single.KINDS)}, linear, a function of"
            f" jax.nn or another one, or {' and '.join(_CLAMPED)}, got {names}"
        )
    made: jax.Array = function(x).astype(x.dtype)
    return made
