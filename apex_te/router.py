"""Router of a mixture of experts: each token's top-k experts, and auxiliary losses.

The kernels are those of ``apex_te.ops.moe_router``. They compute in float32, results are bitwise
reproducible, and the host does not wait for the GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .ops._router_function import run
from .ops.binding import check_dense, checked
from .ops.moe_router import RouterOutputs
from .runtime.router_options import check_choice

__all__ = [
    "AuxScores", "DenseRouting", "Routing", "aux_scores", "load_balance_loss", "router_z_loss",
    "topk_router", "topk_router_dense", "update_expert_bias",
]  # fmt: skip


class Routing(NamedTuple):
    """Experts of each token, from ``topk_router``.

    Attributes:
        probs: [..., top_k] float32, probabilities of the chosen experts; differentiable.
        index: [..., top_k] int32, the chosen experts, in descending order of score; for
            ``apex_te.permutation.moe_permute`` with ``map_type="index"``.
        counts: [experts] int32, number of tokens of each expert; ``m_splits`` of ``GroupedLinear``.
    """

    probs: torch.Tensor
    index: torch.Tensor  # type: ignore[assignment]  # tuples have a method of the name
    counts: torch.Tensor


class DenseRouting(NamedTuple):
    """Experts of each token as masks over all experts, from ``topk_router_dense``.

    Attributes:
        probs: [..., experts] in the logits' dtype, 0 for experts that were not chosen;
            differentiable.
        routing_map: [..., experts] bool, True for the chosen experts.
        index: [..., top_k] int32, the chosen experts, in descending order of score.
        counts: [experts] int32, number of tokens of each expert.
    """

    probs: torch.Tensor
    routing_map: torch.Tensor
    index: torch.Tensor  # type: ignore[assignment]  # tuples have a method of the name
    counts: torch.Tensor


class AuxScores(NamedTuple):
    """Arguments of ``load_balance_loss``, from ``aux_scores``.

    Attributes:
        scores: [..., experts] float32, scores of all experts, which sum to 1 for each token;
            differentiable.
        counts: int32 [experts], or [sequences, experts]: for each expert, the number of tokens that
            have it among their ``top_k`` best.
    """

    scores: torch.Tensor
    counts: torch.Tensor


@checked
def topk_router(
    logits: torch.Tensor,
    top_k: int,
    *,
    score_function: str = "softmax",
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    expert_bias: torch.Tensor | None = None,
) -> Routing:
    """Chooses ``top_k`` experts for each token, and computes their probabilities.

    The experts with the largest scores are chosen; of equal scores, the lower expert index comes
    first. CPU and GPU choose the same experts. A token with a NaN logit has NaN probabilities and
    valid experts.

    Args:
        logits: [..., experts] float32, float16 or bfloat16; at most 1024 experts. Do not change it
            before backward, which computes from it.
        top_k: number of experts of each token.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus", the square root of softplus. The
            probabilities of the last two are divided by their sum if ``top_k`` is above 1.
        use_pre_softmax: take the softmax over all experts before the choice; False takes it over
            the chosen ones. Other score functions ignore it.
        num_groups: number of groups of consecutive experts, for ``group_topk``.
        group_topk: choose experts from this many groups only, those whose ``top_k // group_topk``
            largest scores have the largest sum; None or 0 chooses from all.
        scaling_factor: factor of the probabilities; None or 0 does not scale.
        expert_bias: [experts] float32, added to the scores for the choice only; must be None for
            "softmax".

    Returns:
        probs [..., top_k] float32, index [..., top_k] int32 and counts [experts] int32.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or option does not match.
        NotImplementedError: there are more than 1024 experts.
    """
    lead, made = _routed(
        "topk_router", ("probs", "counts"), logits, top_k, score_function, use_pre_softmax,
        num_groups, group_topk, scaling_factor, expert_bias,
    )  # fmt: skip
    return Routing(made.probs.view(*lead, top_k), made.index.view(*lead, top_k), made.counts[0])


@checked
def topk_router_dense(
    logits: torch.Tensor,
    top_k: int,
    *,
    score_function: str = "softmax",
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    expert_bias: torch.Tensor | None = None,
) -> DenseRouting:
    """Chooses experts as ``topk_router`` does; returns masks over all experts, as Megatron expects.

    Args:
        logits: [..., experts] float32, float16 or bfloat16; at most 1024 experts.
        top_k, score_function, use_pre_softmax, num_groups, group_topk, scaling_factor, expert_bias:
            as in ``topk_router``.

    Returns:
        probs [..., experts] in the logits' dtype, routing_map [..., experts] bool, index [...,
        top_k] int32 and counts [experts] int32.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or option does not match.
        NotImplementedError: there are more than 1024 experts.
    """
    lead, made = _routed(
        "topk_router_dense", ("dense_probs", "routing_map", "counts"), logits, top_k,
        score_function, use_pre_softmax, num_groups, group_topk, scaling_factor, expert_bias,
    )  # fmt: skip
    probs, routing_map = made.dense_probs.view(logits.shape), made.routing_map.view(logits.shape)
    return DenseRouting(probs, routing_map, made.index.view(*lead, top_k), made.counts[0])


@checked
def aux_scores(
    logits: torch.Tensor,
    top_k: int,
    score_function: str = "softmax",
    *,
    sequences: int | None = None,
    sequence_first: bool = False,
) -> AuxScores:
    """Computes the scores of all experts and the tokens per expert, for ``load_balance_loss``.

    Tokens are counted for the experts that ``topk_router`` chooses without groups and without
    ``expert_bias``.

    Args:
        logits: [..., experts] float32, float16 or bfloat16; at most 1024 experts.
        top_k: number of experts of each token.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus"; scores of the last two are divided
            by their sum over the experts.
        sequences: number of sequences of equal length in the batch, which are counted separately;
            None counts all tokens together.
        sequence_first: tokens are ordered [sequence length, sequences], as in Megatron, instead of
            [sequences, sequence length].

    Returns:
        scores, float32 in the shape of ``logits``, and counts, int32 [experts] or [sequences,
        experts].

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or option does not match.
        NotImplementedError: there are more than 1024 experts.
    """
    check_choice("aux_scores", logits, top_k, score_function)
    rows = logits.flatten(0, -2)
    if sequences is not None and (sequences < 1 or rows.shape[0] % sequences):
        raise ValueError(
            f"aux_scores: sequences must divide the {rows.shape[0]} tokens, got {sequences}"
        )
    made = run(
        rows, top_k, score_function, ("scores", "counts"), sequences=sequences or 1,
        sequence_first=sequence_first,
    )  # fmt: skip
    counts = made.counts[0] if sequences is None else made.counts
    return AuxScores(made.scores.view(logits.shape), counts)


@checked
def load_balance_loss(
    scores: torch.Tensor,
    counts: torch.Tensor,
    total_tokens: int | torch.Tensor,
    top_k: int,
    coeff: float,
    *,
    sequence_first: bool = False,
) -> torch.Tensor:
    """Computes the load-balance loss of the Switch Transformer (arXiv 2101.03961).

    It is ``coeff * experts / (top_k * total_tokens**2)`` times the sum over experts of token count
    times summed scores; with balanced experts it is near ``coeff``. With counts of several
    sequences it is the mean of their losses. It is differentiable in ``scores``.

    Args:
        scores: [..., experts] float32, float16 or bfloat16, as from ``aux_scores``.
        counts: [experts], or [sequences, experts] for a loss per sequence, in any real dtype, as
            from ``aux_scores``. It may be summed over ranks.
        total_tokens: number of tokens that ``counts`` covers, per sequence if there are several; or
            a tensor of one element.
        top_k: number of experts of each token.
        coeff: factor of the loss.
        sequence_first: tokens of ``scores`` are ordered [sequence length, sequences]; only for
            counts of several sequences.

    Returns:
        A scalar in the dtype of ``scores``; sums are in float32.

    Raises:
        TypeError: an argument is not a dense tensor with a real dtype.
        ValueError: a shape or device does not match.
    """
    check_dense("load_balance_loss", scores=scores, counts=counts)
    experts = scores.shape[-1] if scores.dim() else 0
    if counts.dim() not in (1, 2) or counts.shape[-1:] != (experts,):
        raise ValueError(
            f"load_balance_loss: counts must have shape [{experts}] or [sequences, {experts}], "
            f"got {list(counts.shape)}"
        )
    if not 1 <= top_k <= experts:
        raise ValueError(
            f"load_balance_loss: top_k must be from 1 to the {experts} experts, got {top_k}"
        )
    rows = scores.reshape(-1, experts)
    if counts.dim() == 1:
        sums, sequences = rows.sum(0, dtype=torch.float32), 1
    else:
        sequences = counts.shape[0]
        if not sequences or rows.shape[0] % sequences:
            raise ValueError(
                f"load_balance_loss: counts must have rows that divide the {rows.shape[0]} tokens, "
                f"got {sequences}"
            )
        order = (-1, sequences) if sequence_first else (sequences, -1)
        sums = rows.unflatten(0, order).sum(0 if sequence_first else 1, dtype=torch.float32)
    factor = experts * coeff / (top_k * sequences)
    loss = (sums * counts.float()).sum() * factor / total_tokens / total_tokens
    return loss.to(scores.dtype)


@checked
def router_z_loss(logits: torch.Tensor, coeff: float) -> torch.Tensor:
    """Computes the router z-loss (arXiv 2202.08906), which keeps logits small.

    It is ``coeff`` times the mean over tokens of log(sum(exp(logits)))**2; differentiable. It is
    NaN without tokens, and if a token's largest logit is infinite.

    Args:
        logits: [..., experts] float32, float16 or bfloat16; at most 1024 experts.
        coeff: factor of the loss.

    Returns:
        A float32 scalar.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: ``logits`` does not have at least two dimensions and one expert.
        NotImplementedError: there are more than 1024 experts.
    """
    check_choice("router_z_loss", logits, 1, "softmax")
    lse = run(logits.flatten(0, -2), 0, "softmax", ("lse",)).lse
    return z_loss_of(lse, coeff)


def z_loss_of(lse: torch.Tensor, coeff: float) -> torch.Tensor:
    """Computes the router z-loss from log(sum(exp(logits))) of each token."""
    return lse.square().mean() * coeff


@checked
@torch.no_grad()
def update_expert_bias(
    expert_bias: torch.Tensor,
    counts: torch.Tensor,
    rate: float,
    *,
    group: Any = None,
) -> torch.Tensor:
    """Updates ``expert_bias`` in place to balance the experts without a loss (arXiv 2408.15664).

    The bias of an expert with fewer tokens than the mean increases by ``rate``, and that of an
    expert with more decreases by it.

    Args:
        expert_bias: [..., experts] in a floating-point dtype, e.g. [experts] or [layers, experts].
        counts: int32 or int64, in the shape of ``expert_bias``: tokens of each expert since the
            last update. It is not changed.
        rate: the step, e.g. 1e-3.
        group: process group over which ``counts`` are summed first; all its ranks must call. None
            does not sum.

    Returns:
        ``expert_bias``.

    Raises:
        TypeError: ``counts`` does not have an integer dtype, or ``expert_bias`` does not have a
            floating-point one.
        ValueError: the shapes or devices do not match.
    """
    check_dense("update_expert_bias", expert_bias=expert_bias, counts=counts)
    if not expert_bias.is_floating_point():
        raise TypeError(
            f"update_expert_bias: expert_bias must have a floating dtype, got {expert_bias.dtype}"
        )
    if counts.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"update_expert_bias: counts must have dtype int32 or int64, got {counts.dtype}"
        )
    if not counts.dim() or counts.shape != expert_bias.shape:
        raise ValueError(
            "update_expert_bias: counts must have the shape of expert_bias, "
            f"{list(expert_bias.shape)}, got {list(counts.shape)}"
        )
    totals = counts.to(torch.int64, copy=group is not None)
    if group is not None:
        torch.distributed.all_reduce(totals, group=group)
    # In integers: a mean in float32 would be rounded.
    missing = totals.sum(-1, keepdim=True) - totals * totals.shape[-1]
    return expert_bias.add_(missing.sign().to(expert_bias.dtype), alpha=rate)


def _routed(
    owner: str,
    outputs: tuple[str, ...],
    logits: torch.Tensor,
    top_k: int,
    score_function: str,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    expert_bias: torch.Tensor | None,
) -> tuple[torch.Size, RouterOutputs]:
    """Checks arguments of ``topk_router``; returns the leading dimensions, and the results."""
    check_choice(owner, logits, top_k, score_function, num_groups, group_topk)
    if expert_bias is not None and score_function == "softmax":
        raise ValueError(f"{owner}: expert_bias must be None for 'softmax', got a tensor")
    made = run(
        logits.flatten(0, -2), top_k, score_function, outputs, use_pre_softmax=use_pre_softmax,
        num_groups=num_groups, group_topk=group_topk, scaling_factor=scaling_factor,
        expert_bias=expert_bias,
    )  # fmt: skip
    return logits.shape[:-1], made
