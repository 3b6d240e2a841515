"""Router of a mixture of experts: scores, the choice of each token's experts, and the gradient.

One kernel computes all that a call asks for, and another the gradient of it, from the logits and
the chosen experts. Both have the bits of PyTorch's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ...runtime.router_options import check_choice, score_number
from . import _checks
from ._checked import checked
from ._contract import whole_call

__all__ = ["RouterOptions", "RouterOutputs", "moe_router_bwd", "moe_router_fwd", "route"]

_OP = "moe_router"
_FIXED = ("index", "routing_map", "counts")  # which have no gradients


class RouterOutputs(NamedTuple):
    """Results of ``moe_router_fwd`` as in ``apex_te.ops.moe_router``, None if not asked for."""

    index: jax.Array  # type: ignore[assignment]  # tuples have a method of the name
    probs: Any = None
    dense_probs: Any = None
    routing_map: Any = None
    scores: Any = None
    lse: Any = None
    counts: Any = None


class RouterOptions(NamedTuple):
    """Options of ``moe_router_fwd`` by which experts are chosen."""

    top_k: int
    score_function: str = "softmax"
    use_pre_softmax: bool = False
    num_groups: int | None = None
    group_topk: int | None = None
    scaling_factor: float | None = None


@checked
def moe_router_fwd(
    logits: jax.Array,
    top_k: int,
    score_function: str = "softmax",
    *,
    outputs: Collection[str] = ("probs", "counts"),
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    expert_bias: jax.Array | None = None,
    sequences: int = 1,
    sequence_first: bool = False,
) -> RouterOutputs:
    """Chooses experts, and computes what ``outputs`` names, in one kernel and without a gradient.

    ``index`` is always computed.
    """
    score = score_number("moe_router_fwd", score_function, use_pre_softmax)
    made = whole_call(
        _OP, "moe_router_fwd", {"logits": logits, "expert_bias": expert_bias},
        [name for name in outputs if name != "index"], extents={"k": top_k, "g": sequences},
        score_function=score, num_groups=num_groups or 0, group_topk=group_topk or 0,
        scaling_factor=float(scaling_factor or 1.0), sequence_first=sequence_first,
    )  # fmt: skip
    return RouterOutputs(**made)


@checked
def moe_router_bwd(
    logits: jax.Array,
    index: jax.Array,
    score_function: str = "softmax",
    *,
    grad_probs: jax.Array | None = None,
    grad_dense_probs: jax.Array | None = None,
    grad_scores: jax.Array | None = None,
    grad_lse: jax.Array | None = None,
    use_pre_softmax: bool = False,
    scaling_factor: float | None = None,
) -> jax.Array:
    """Computes the gradient of the logits from those of ``RouterOutputs``, in one kernel."""
    score = score_number("moe_router_bwd", score_function, use_pre_softmax)
    given = {
        "logits": logits, "index": index, "grad_probs": grad_probs,
        "grad_dense_probs": grad_dense_probs, "grad_scores": grad_scores, "grad_lse": grad_lse,
    }  # fmt: skip
    factor = float(scaling_factor or 1.0)
    made = whole_call(_OP, "moe_router_bwd", given, score_function=score, scaling_factor=factor)
    return made["grad_logits"]


@checked
def route(
    logits: jax.Array,
    options: RouterOptions,
    outputs: tuple[str, ...] = ("probs", "counts"),
    expert_bias: jax.Array | None = None,
    sequences: int = 1,
) -> RouterOutputs:
    """Computes ``moe_router_fwd`` of logits [tokens, experts], differentiably in them.

    ``expert_bias`` has no gradient.
    """
    check_choice("route", _checks.array("route", "logits", logits), *options[:2], *options[3:5])
    made = _differentiable(options, outputs, sequences)(logits, expert_bias)
    # The tangents of integers, which ops cannot take, end at an operation that has none.
    return made._replace(
        **{name: x | x for name in _FIXED if (x := getattr(made, name)) is not None}
    )


@functools.cache
def _differentiable(
    options: RouterOptions, outputs: tuple[str, ...], sequences: int
) -> Callable[..., RouterOutputs]:
    """Returns ``route`` with these options; it keeps the logits and the chosen experts only."""

    def forward(logits: Any, expert_bias: Any) -> RouterOutputs:
        return moe_router_fwd(
            logits, expert_bias=expert_bias, outputs=outputs, sequences=sequences,
            **options._asdict(),
        )  # fmt: skip

    run = jax.custom_vjp(forward)

    def fwd(logits: Any, expert_bias: Any) -> tuple[RouterOutputs, Any]:
        made = forward(logits.value, None if expert_bias is None else expert_bias.value)
        return made, (logits.value, made.index, None if expert_bias is None else expert_bias.value)

    def bwd(kept: Any, cotangents: RouterOutputs) -> tuple[Any, Any]:
        logits, index, expert_bias = kept
        of_bias = None if expert_bias is None else jnp.zeros_like(expert_bias)
        given = {
            f"grad_{name}": grad
            for name, grad in cotangents._asdict().items()
            if name not in _FIXED and grad is not None and not isinstance(grad, SymbolicZero)
        }
        if not given:
            return jnp.zeros_like(logits), of_bias
        _, score_function, use_pre_softmax, *_, scaling_factor = options
        grad = moe_router_bwd(
            logits, index, score_function, use_pre_softmax=use_pre_softmax,
            scaling_factor=scaling_factor, **given,
        )  # fmt: skip
        return grad, of_bias

    run.defvjp(fwd, bwd, symbolic_zeros=True)
    return run
