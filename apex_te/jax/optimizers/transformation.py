"""optax transformations that can also step the parameters themselves, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

_Step = Callable[..., tuple[Any, Any]]


class FusedTransformation(optax.GradientTransformationExtraArgs):
    """optax transformation that can also step the parameters themselves.

    ``init(params)`` and ``update(grads, state, params)`` are optax's. The updates are new minus old
    parameters in float32. Adding them by ``optax.apply_updates`` may be off by the last bit if a
    parameter shrinks to less than half or grows to more than twice its value.

    ``step(params, state, grads)`` replaces both calls: it returns the new parameters and the next
    state. In ``jax.jit`` it updates donated arrays in place if the jitted function returns them in
    the order of its arguments, since JAX pairs donated buffers with results in order.

    ``update`` and ``step`` take two more arguments by name, each a number or an array of one
    element: ``inv_scale`` (1 / loss scale) multiplies all gradients, and a nonzero ``found_inf``
    skips the step.

    Args:
        name: name of the optimizer, for errors.
        init: function of the parameters that makes the state.
        step: function of parameters, state, gradients, ``inv_scale`` and ``found_inf``.
    """

    step: _Step
    _arguments: tuple[Any, ...]

    def __new__(cls, name: str, init: Callable[[Any], Any], step: _Step) -> FusedTransformation:
        """Makes the transformation of an optimizer."""

        def stepped(
            params: Any, state: Any, grads: Any, *, inv_scale: Any = None, found_inf: Any = None
        ) -> tuple[Any, Any]:
            """Returns the parameters after a step, and the next state."""
            scale = None if inv_scale is None else _element(inv_scale, jnp.float32)
            flag = None if found_inf is None else _element(found_inf != 0, jnp.int32)
            return step(params, state, grads, scale, flag)

        def update(
            updates: Any, state: Any, params: Any = None, *, inv_scale: Any = None,
            found_inf: Any = None, **_: Any,
        ) -> tuple[Any, Any]:  # fmt: skip
            """Returns the differences that a step makes in the parameters, and the next state."""
            if params is None:
                raise ValueError(f"{name}: params must be given to update, got None")
            new, state = stepped(params, state, updates, inv_scale=inv_scale, found_inf=found_inf)
            return jax.tree.map(_difference, new, params), state

        self = super().__new__(cls, init, update)
        self.step = stepped
        self._arguments = (name, init, step)
        return self

    def __getnewargs__(self) -> Any:
        """Returns what a copy is made of."""
        return self._arguments


def _element(value: Any, dtype: Any) -> jax.Array:
    """Returns a number or an array of one element as an array [1] of a dtype."""
    return jnp.asarray(value, dtype).reshape(1)


def _difference(new: jax.Array, old: jax.Array) -> jax.Array:
    """Returns new - old in float32."""
    return new.astype(jnp.float32) - old.astype(jnp.float32)
