"""Router of a mixture of experts: scores, the choice of each token's experts, and the gradient.

One kernel computes all that a call asks for, and another the gradient of it, from the logits and
the chosen experts. Both have the bits of PyTorch's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ...runtime.router_options import check_choice, score_number
from . import _checks
from ._checked import checked
from ._contract import whole_call

__all__ = ["RouterOptions", "RouterOutputs", "route"]

_FIXED = ("index", "routing_map", "counts")  # not differentiable


class RouterOutputs(NamedTuple):
    """Outputs of ``route``; None for one that was not requested.

    Attributes:
        index: [tokens, top_k] int32, the chosen experts, in descending order of score.
        probs: [tokens, top_k] float32, probabilities of the chosen experts.
        dense_probs: [tokens, experts] in the logits' dtype, ``probs`` of the chosen experts, else
            0.
        routing_map: [tokens, experts] bool, True for the chosen experts.
        scores: [tokens, experts] float32, scores of all experts, which sum to 1.
        lse: [tokens] float32, log(sum(exp(logits))).
        counts: [sequences, experts] int32, number of tokens routed to each expert.
    """

    index: Any  # tuples have a method of the name
    probs: Any = None
    dense_probs: Any = None
    routing_map: Any = None
    scores: Any = None
    lse: Any = None
    counts: Any = None


class RouterOptions(NamedTuple):
    """Rules by which ``route`` chooses experts.

    Attributes:
        top_k: number of experts of each token.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus".
        use_pre_softmax: take the softmax over all experts before the choice, not over the chosen
            ones.
        num_groups: number of groups of consecutive experts, for ``group_topk``.
        group_topk: choose experts from this many groups only, those with the largest scores; None
            chooses from all.
        scaling_factor: factor of the probabilities; None does not scale.
    """

    top_k: int
    score_function: str = "softmax"
    use_pre_softmax: bool = False
    num_groups: int | None = None
    group_topk: int | None = None
    scaling_factor: float | None = None


@checked
def route(
    logits: jax.Array,
    options: RouterOptions,
    outputs: tuple[str, ...] = ("probs", "counts"),
    expert_bias: jax.Array | None = None,
    sequences: int = 1,
) -> RouterOutputs:
    """Chooses the experts of each token and computes the requested outputs, differentiably.

    Args:
        logits: [tokens, experts] float32, float16 or bfloat16; at most 1024 experts.
        options: a ``RouterOptions``.
        outputs: names of fields of ``RouterOutputs``; ``index`` is always computed.
        expert_bias: [experts] float32, added to the scores for the choice only.
        sequences: number of sequences of equal length, which ``counts`` counts separately; tokens
            are ordered [sequences, sequence length].

    Returns:
        A ``RouterOutputs``; probs, dense_probs, scores and lse have gradients with respect to the
        logits.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or option does not match.
        NotImplementedError: there are more than 1024 experts.
    """
    check_choice("route", _checks.array("route", "logits", logits), *options[:2], *options[3:5])
    made = _differentiable(options, outputs, sequences)(logits, expert_bias)
    # The tangents of integers, which ops cannot take, end at an operation that has none.
    fixed = {name: x | x for name in _FIXED if (x := getattr(made, name)) is not None}
    return made._replace(**fixed)


@functools.cache
def _differentiable(
    options: RouterOptions, outputs: tuple[str, ...], sequences: int
) -> Callable[..., RouterOutputs]:
    """Returns ``route`` with these options; it keeps the logits and the chosen experts only."""
    top_k, score_function, use_pre_softmax, num_groups, group_topk, factor = options
    shared: dict[str, Any] = {
        "score_function": score_number("route", score_function, use_pre_softmax),
        "scaling_factor": float(factor or 1.0),
    }

    def forward(logits: Any, expert_bias: Any) -> RouterOutputs:
        made = whole_call(
            "moe_router", "moe_router_fwd", {"logits": logits, "expert_bias": expert_bias},
            outputs, extents={"k": top_k, "g": sequences}, num_groups=num_groups or 0,
            group_topk=group_topk or 0, sequence_first=False, **shared,
        )  # fmt: skip
        return RouterOutputs(**made)

    run = jax.custom_vjp(forward)

    def fwd(logits: Any, bias: Any) -> tuple[RouterOutputs, Any]:
        value = None if bias is None else bias.value
        made = forward(logits.value, value)
        return made, (logits.value, made.index, value)

    def bwd(kept: Any, cotangents: RouterOutputs) -> tuple[Any, Any]:
        logits, index, bias = kept
        of_bias = None if bias is None else jnp.zeros_like(bias)
        given = {
            f"grad_{name}": grad
            for name, grad in cotangents._asdict().items()
            if name not in _FIXED and grad is not None and not isinstance(grad, SymbolicZero)
        }
        if not given:
            return jnp.zeros_like(logits), of_bias
        given |= {"logits": logits, "index": index}
        return whole_call("moe_router", "moe_router_bwd", given, **shared)["grad_logits"], of_bias

    run.defvjp(fwd, bwd, symbolic_zeros=True)
    return run
