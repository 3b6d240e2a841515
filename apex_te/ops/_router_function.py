"""Autograd function of ``apex_te.router``: one forward and one backward kernel for its results."""

from __future__ import annotations

from typing import Any

import torch

from . import moe_router as _op
from .binding import OpFunction, needs_autograd, once_differentiable


def run(
    logits: torch.Tensor,
    top_k: int,
    score_function: str,
    outputs: tuple[str, ...],
    *,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    expert_bias: torch.Tensor | None = None,
    sequences: int = 1,
    sequence_first: bool = False,
) -> _op.RouterOutputs:
    """Computes ``moe_router_fwd``, differentiably in the logits, for checked arguments."""
    args = (
        logits, top_k, score_function, outputs, use_pre_softmax, num_groups, group_topk,
        scaling_factor, None if expert_bias is None else expert_bias.detach(), sequences,
        sequence_first,
    )  # fmt: skip
    if needs_autograd(logits):
        names = _names(outputs)
        return _op.RouterOutputs(**dict(zip(names, MoeRouter.apply(*args), strict=True)))
    return _forward(*args)


def _names(outputs: tuple[str, ...]) -> list[str]:
    """Returns the names of the results that a call has, in the order of ``RouterOutputs``."""
    return [name for name in _op.RouterOutputs._fields if name == "index" or name in outputs]


def _forward(
    logits: torch.Tensor,
    top_k: int,
    score_function: str,
    outputs: tuple[str, ...],
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    expert_bias: torch.Tensor | None,
    sequences: int,
    sequence_first: bool,
) -> _op.RouterOutputs:
    return _op.moe_router_fwd(
        logits, top_k, score_function, outputs=outputs, use_pre_softmax=use_pre_softmax,
        num_groups=num_groups, group_topk=group_topk, scaling_factor=scaling_factor,
        expert_bias=expert_bias, sequences=sequences, sequence_first=sequence_first,
    )  # fmt: skip


class MoeRouter(OpFunction):
    """Autograd function of ``_forward`` that returns the results which the call has.

    It saves the logits and the chosen experts only.
    """

    LABEL = "moe_router"

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        top_k: int,
        score_function: str,
        outputs: tuple[str, ...],
        use_pre_softmax: bool,
        num_groups: int | None,
        group_topk: int | None,
        scaling_factor: float | None,
        *rest: Any,
    ) -> tuple[torch.Tensor, ...]:
        logits = logits.contiguous()
        made = _forward(
            logits, top_k, score_function, outputs, use_pre_softmax, num_groups, group_topk,
            scaling_factor, *rest,
        )  # fmt: skip
        ctx.options = score_function, use_pre_softmax, scaling_factor
        ctx.names = _names(outputs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, made.index)
        fixed = (made.index, made.routing_map, made.counts)
        ctx.mark_non_differentiable(*(t for t in fixed if t is not None))
        return tuple(t for t in made if t is not None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        logits, index = ctx.saved_tensors
        score_function, use_pre_softmax, scaling_factor = ctx.options
        given = dict(zip(ctx.names, grads, strict=True))
        of_values = {
            f"grad_{name}": given[name]
            for name in ("probs", "dense_probs", "scores", "lse")
            if given.get(name) is not None
        }
        grad = None
        if of_values:
            grad = _op.moe_router_bwd(
                logits, index, score_function, use_pre_softmax=use_pre_softmax,
                scaling_factor=scaling_factor, **of_values,
            )  # fmt: skip
        return grad, *(None,) * 10
