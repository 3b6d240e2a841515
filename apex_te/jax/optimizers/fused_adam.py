"""Adam and AdamW as a fused optax transformation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..ops import multi_tensor_optim
from .leaves import master_weights_of, next_count, number, rate_at, updated, with_dtypes, zeros_of
from .transformation import FusedTransformation

__all__ = ["FusedAdamState", "fused_adam", "moments_transformation"]


class FusedAdamState(NamedTuple):
    """State of ``fused_adam`` and ``fused_lamb``, float32 trees of the parameters' structure.

    ``count`` is int32 [], the steps so far; ``mu`` and ``nu`` average gradients and their squares;
    ``master`` has None for each parameter without a master weight.
    """

    count: jax.Array
    mu: Any
    nu: Any
    master: Any


def fused_adam(
    learning_rate: float | jax.Array | Callable[[Any], Any] = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Any = None,
    *,
    bias_correction: bool = True,
    adam_w_mode: bool = True,
    master_weights: bool = False,
) -> FusedTransformation:
    """Makes AdamW (decoupled weight decay) or Adam, with the steps of ``apex_te``'s ``FusedAdam``.

    A step reads and writes every array once, in a launch for up to 64 parameters. Parameters and
    gradients may be float32, float16 and bfloat16, also mixed.

    Args:
        learning_rate: a number, an array of one element, or a schedule such as optax's: a function
            of the number of steps so far.
        b1: decay of the averages of gradients, in [0, 1).
        b2: decay of the averages of their squares, in [0, 1).
        eps: added to the denominator.
        weight_decay: coefficient of weight decay.
        mask: tree of bools, True for parameters with weight decay, in the parameters' structure or
            a prefix of it; or a function that returns it for the parameters. None means all True.
        bias_correction: divide the averages by 1 - b**step.
        adam_w_mode: decoupled weight decay (AdamW); False adds it to the gradient (Adam).
        master_weights: keep a float32 copy of every 16-bit parameter in the state. Steps update the
            copy; the parameter is its rounded value.

    Returns:
        The transformation, with ``step`` beside optax's ``init`` and ``update``.

    Raises:
        TypeError: an option is not a number. ``init`` and steps raise it if a parameter or
            gradient has a dtype that is not listed.
        ValueError: an option is out of range. Steps raise it if a shape or structure does not
            match.
    """
    return moments_transformation(
        "fused_adam", multi_tensor_optim.adam, learning_rate, (b1, b2), eps, weight_decay, mask,
        master_weights, adamw=adam_w_mode, bias_correction=bias_correction,
    )  # fmt: skip


def moments_transformation(
    name: str, op: Callable[..., multi_tensor_optim.AdamStep], learning_rate: Any,
    betas: tuple[float, float], eps: float, weight_decay: float, mask: Any, master_weights: bool,
    prepare: Callable[[list[Any]], dict[str, Any]] | None = None, **options: Any,
) -> FusedTransformation:  # fmt: skip
    """Makes the transformation of an optimizer that keeps two moments of the gradients.

    ``prepare`` is a function of the list of gradients that returns more arguments for ``op``, a
    step such as ``multi_tensor_optim.adam``.
    """
    b1, b2 = (number(name, f"b{i}", beta, 1.0) for i, beta in enumerate(betas, 1))
    op = functools.partial(op, betas=(b1, b2), eps=number(name, "eps", eps), **options)
    weight_decay = number(name, "weight_decay", weight_decay)
    if not callable(learning_rate):
        rate_at(name, learning_rate, jnp.zeros([], jnp.int32))  # checks a number

    def init(params: Any) -> FusedAdamState:
        """Returns the state before the first step."""
        with_dtypes(name, params)
        count, masters = jnp.zeros([], jnp.int32), master_weights_of(params, master_weights)
        return FusedAdamState(count, zeros_of(params), zeros_of(params), masters)

    def step(params: Any, state: Any, grads: Any, inv_scale: Any, found_inf: Any) -> Any:
        more = {} if prepare is None else prepare(jax.tree.leaves(grads))
        run = functools.partial(
            op, step=state.count + 1, lr=rate_at(name, learning_rate, state.count),
            inv_scale=inv_scale, found_inf=found_inf, **more,
        )  # fmt: skip

        def leaves(*lists: Any, masters: Any, decays: bool) -> Any:
            return run(*lists, masters=masters, weight_decay=weight_decay if decays else 0.0)

        moments = {"exp_avgs": state.mu, "exp_avg_sqs": state.nu}
        made = updated(with_dtypes(name, params), grads, moments, state.master, mask, leaves)
        count = next_count(state.count, found_inf)
        found = FusedAdamState(count, made["exp_avgs"], made["exp_avg_sqs"], made["masters"])
        return made["params"], found

    return FusedTransformation(name, init, step)
