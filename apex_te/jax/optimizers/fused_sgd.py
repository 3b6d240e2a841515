"""Stochastic gradient descent as a fused optax transformation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..ops import multi_tensor_optim
from .leaves import master_weights_of, next_count, number, rate_at, updated, with_dtypes, zeros_of
from .transformation import FusedTransformation

__all__ = ["FusedSGDState", "fused_sgd"]


class FusedSGDState(NamedTuple):
    """State of ``fused_sgd``, float32 trees of the parameters' structure.

    ``count`` is int32 [], the steps so far; ``trace`` are momentum buffers, None without momentum;
    ``master`` has None for each parameter without a master weight.
    """

    count: jax.Array
    trace: Any
    master: Any


def fused_sgd(
    learning_rate: float | jax.Array | Callable[[Any], Any] = 1e-3,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    mask: Any = None,
    *,
    dampening: float = 0.0,
    master_weights: bool = False,
) -> FusedTransformation:
    """Makes stochastic gradient descent, with the steps of ``apex_te``'s ``FusedSGD``.

    Args:
        learning_rate, mask, master_weights: as in ``fused_adam``.
        momentum: factor of the momentum buffer at each step; 0 keeps no buffers.
        nesterov: use Nesterov momentum; requires momentum and no dampening.
        weight_decay: coefficient of the L2 term that is added to the gradient.
        dampening: weight the gradient by 1 - dampening in the momentum buffer, except at the first
            step.

    Returns:
        The transformation, with ``step`` beside optax's ``init`` and ``update``.

    Raises:
        TypeError: as in ``fused_adam``.
        ValueError: as in ``fused_adam``, or ``nesterov`` without momentum or with dampening.
    """
    name = "fused_sgd"
    momentum, decay = number(name, "momentum", momentum), number(name, "weight_decay", weight_decay)
    if nesterov and (not momentum or dampening):
        raise ValueError(
            f"{name}: nesterov must be False without momentum or with dampening, got True"
        )
    op = functools.partial(
        multi_tensor_optim.sgd, momentum=momentum, dampening=float(dampening), nesterov=nesterov
    )
    if not callable(learning_rate):
        rate_at(name, learning_rate, jnp.zeros([], jnp.int32))  # checks a number

    def init(params: Any) -> FusedSGDState:
        """Returns the state before the first step."""
        with_dtypes(name, params)
        trace = zeros_of(params) if momentum else None
        masters = master_weights_of(params, master_weights)
        return FusedSGDState(jnp.zeros([], jnp.int32), trace, masters)

    def step(params: Any, state: Any, grads: Any, inv_scale: Any, found_inf: Any) -> Any:
        run = functools.partial(
            op, lr=rate_at(name, learning_rate, state.count), inv_scale=inv_scale
        )
        is_first = (state.count == 0).reshape(1)

        def leaves(*lists: Any, masters: Any, decays: bool) -> Any:
            options = {"weight_decay": decay if decays else 0.0}
            if not (momentum and dampening):
                return run(*lists, masters=masters, found_inf=found_inf, **options)
            # Only the device knows whether this step is the first: one of two launches is idle.
            params, grads, momentums = lists
            for first_step, other in ((True, ~is_first), (False, is_first)):
                skip = other if found_inf is None else other | (found_inf != 0)
                made = run(
                    params, grads, momentums, masters=masters, first_step=first_step,
                    found_inf=skip.astype(jnp.int32), **options,
                )  # fmt: skip
                params, momentums, masters = made.params, made.momentums, made.masters or None
            return made

        moments = {"momentums": state.trace} if momentum else {}
        made = updated(with_dtypes(name, params), grads, moments, state.master, mask, leaves)
        count = next_count(state.count, found_inf)
        return made["params"], FusedSGDState(count, made.get("momentums"), made["masters"])

    return FusedTransformation(name, init, step)
