"""Functions of a mixture-of-experts router, in PyTorch: top-k choice, scores, load-balance loss.

They compute in float32 and take gradients through the scores; the choice of experts has none.
"""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = [
    "fused_compute_score_for_moe_aux_loss",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
]

_SMALL = 1e-20  # keeps the sum of scores from being 0


def fused_topk_with_score_function(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses ``topk`` experts for each token, and computes the probabilities of the chosen ones.

    Args:
        logits: [tokens, experts] float32, float16 or bfloat16.
        topk: number of experts of each token.
        use_pre_softmax: take the softmax over all experts before the choice; False takes it over
            the chosen ones. Only "softmax" reads it.
        num_groups: number of groups of consecutive experts, for ``group_topk``.
        group_topk: choose experts from this many groups only, those whose ``topk // group_topk``
            largest scores have the largest sum; None or 0 chooses from all.
        scaling_factor: factor of the probabilities; None or 0 for none.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus". The probabilities of the last two
            are divided by their sum if ``topk`` is above 1.
        expert_bias: [experts], added to the scores for the choice alone, for "sigmoid" and
            "sqrtsoftplus"; None for none.

    Returns:
        probs: [tokens, experts] in the dtype of ``logits``, 0 where a token does not go.
        routing_map: [tokens, experts] bool, True where a token goes.

    Raises:
        ValueError: an argument has a wrong value.
    """
    owner = "fused_topk_with_score_function"
    _check(owner, logits, topk, score_function)
    if expert_bias is not None and score_function == "softmax":
        raise ValueError(f"{owner}: expert_bias must be None for 'softmax', got a tensor")
    values = logits.float()
    if score_function == "softmax":
        scores = values.softmax(-1) if use_pre_softmax else values
        indices = _chosen(owner, scores, topk, num_groups, group_topk)
        probs = scores.gather(1, indices)
        probs = probs if use_pre_softmax else probs.softmax(-1)
    else:
        scores = _scores(values, score_function)
        biased = scores if expert_bias is None else scores + expert_bias.float()
        indices = _chosen(owner, biased, topk, num_groups, group_topk)
        probs = scores.gather(1, indices)
        probs = probs / (probs.sum(-1, keepdim=True) + _SMALL) if topk > 1 else probs
    if scaling_factor:
        probs = probs * scaling_factor
    whole = torch.zeros_like(logits).scatter(1, indices, probs.to(logits.dtype))
    return whole, _map(logits, indices)


def fused_compute_score_for_moe_aux_loss(
    logits: torch.Tensor, topk: int, score_function: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses ``topk`` experts for each token, and computes normalised scores of all experts.

    Args:
        logits: [tokens, experts] float32, float16 or bfloat16.
        topk: number of experts of each token.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus"; the last two are divided by their
            sum over the experts.

    Returns:
        routing_map: [tokens, experts] bool, True where a token goes.
        scores: [tokens, experts] float32.

    Raises:
        ValueError: an argument has a wrong value.
    """
    _check("fused_compute_score_for_moe_aux_loss", logits, topk, score_function)
    values = logits.float()
    if score_function == "softmax":
        scores = values.softmax(-1)
    else:
        scores = _scores(values, score_function)
        scores = scores / (scores.sum(-1, keepdim=True) + _SMALL)
    return _map(logits, scores.detach().topk(topk, dim=-1).indices), scores


def fused_moe_aux_loss(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int | torch.Tensor,
    num_experts: int,
    topk: int,
    coeff: float,
) -> torch.Tensor:
    """Computes the load-balance loss of the Switch Transformer (arXiv 2101.03961).

    It is ``coeff * num_experts / (topk * total_num_tokens**2)`` times the sum over experts of the
    tokens that an expert gets and its summed probabilities; differentiable in ``probs``.

    Args:
        probs: [tokens, experts] float32, float16 or bfloat16.
        tokens_per_expert: [experts], of any dtype of numbers.
        total_num_tokens: number of tokens that ``tokens_per_expert`` counts; or a tensor of one
            element on the device.
        num_experts: number of experts.
        topk: number of experts of each token.
        coeff: factor of the loss.

    Returns:
        A scalar in the dtype of ``probs``.

    Raises:
        ValueError: ``tokens_per_expert`` has another shape.
    """
    if probs.dim() != 2 or tokens_per_expert.shape != probs.shape[1:]:
        raise ValueError(
            "fused_moe_aux_loss: tokens_per_expert must have the shape of a row of probs, "
            f"{list(probs.shape[1:])}, got {list(tokens_per_expert.shape)}"
        )
    factor = num_experts * coeff / topk
    total = (probs.float().sum(0) * tokens_per_expert.float()).sum()
    return (total * factor / total_num_tokens / total_num_tokens).to(probs.dtype)


def _check(owner: str, logits: torch.Tensor, topk: int, score_function: str) -> None:
    """Raises ValueError unless the arguments of a choice of experts are in range."""
    if logits.dim() != 2:
        raise ValueError(f"{owner}: logits must be [tokens, experts], got {list(logits.shape)}")
    if not 1 <= topk <= logits.shape[1]:
        raise ValueError(
            f"{owner}: topk must be from 1 to the {logits.shape[1]} experts, got {topk}"
        )
    if score_function not in ("softmax", "sigmoid", "sqrtsoftplus"):
        raise ValueError(
            f"{owner}: score_function must be 'softmax', 'sigmoid' or 'sqrtsoftplus', "
            f"got {score_function!r}"
        )


def _scores(values: torch.Tensor, score_function: str) -> torch.Tensor:
    """Returns the score of each expert by itself, by "sigmoid" or "sqrtsoftplus"."""
    return values.sigmoid() if score_function == "sigmoid" else functional.softplus(values).sqrt()


def _map(logits: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Returns a bool mask of the shape of ``logits``, True at ``indices`` of each row."""
    return torch.zeros_like(logits, dtype=torch.bool).scatter(1, indices, True)


def _chosen(
    owner: str,
    scores: torch.Tensor,
    topk: int,
    num_groups: int | None,
    group_topk: int | None,
) -> torch.Tensor:
    """Returns the experts of each token, [tokens, topk], by largest score.

    Args:
        owner: name of the function, for errors.
        scores: [tokens, experts].
        topk: number of experts of each token.
        num_groups, group_topk: as in ``fused_topk_with_score_function``.
    """
    scores = scores.detach()
    if not group_topk:
        return scores.topk(topk, dim=-1).indices
    tokens, experts = scores.shape
    if not num_groups or experts % num_groups or not group_topk <= num_groups:
        raise ValueError(
            f"{owner}: num_groups must divide {experts} experts and be at least group_topk, "
            f"{group_topk}, got {num_groups}"
        )
    if topk < group_topk or topk > group_topk * (experts // num_groups):
        raise ValueError(
            f"{owner}: topk must be from group_topk, {group_topk}, to the number of experts in "
            f"that many groups, got {topk}"
        )
    grouped = scores.view(tokens, num_groups, experts // num_groups)
    best = grouped.topk(topk // group_topk, dim=-1).values.sum(-1)
    allowed = torch.zeros_like(best, dtype=torch.bool)
    allowed.scatter_(1, best.topk(group_topk, dim=-1).indices, True)
    masked = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf"))
    return masked.view(tokens, experts).topk(topk, dim=-1).indices
