"""Functions of a mixture-of-experts router under Transformer Engine's names, by ``apex_te.router``.

They compute in float32 and take gradients through the scores; the choice of experts has none.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch.nn import functional

from ....ops._router_function import run
from ....router import load_balance_loss, topk_router_dense
from ....runtime.named_arguments import named_arguments
from ....runtime.router_options import check_choice
from .._names import neutral

__all__ = [
    "RoutingMapFormat",
    "fused_compute_score_for_moe_aux_loss",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
]


class RoutingMapFormat(enum.IntEnum):
    """Forms of a routing map: a bool, or a bit, for each token and expert."""

    BYTEMAP = 0
    BITMAP_U8 = 1


RoutingMapFormat.__module__ = "transformer_engine.pytorch.router"


@named_arguments(top_k="topk")
def fused_topk_with_score_function(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: torch.Tensor | None,
    routing_map_format: str | int = RoutingMapFormat.BYTEMAP,
    topk_indices: torch.Tensor | None = None,
    qb_histogram: torch.Tensor | None = None,
    qb_bin_bounds: torch.Tensor | None = None,
    qb_histogram_mode: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses ``topk`` experts for each token, and computes the probabilities of the chosen ones.

    Args:
        logits: [..., experts] float32, float16 or bfloat16.
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
        routing_map_format: ``"bytemap"`` or ``"bitmap_u8"``, or the ``RoutingMapFormat``.
        topk_indices: int16, int32 or int64 [..., topk], which gets the chosen experts, largest
            score first, and is returned instead of the map; None for the map.
        qb_histogram, qb_bin_bounds, qb_histogram_mode: must be None.

    Returns:
        probs: [..., experts] in the dtype of ``logits``, 0 where a token does not go.
        routing_map: [..., experts] bool, True where a token goes; as ``"bitmap_u8"`` uint8 [...,
            ceil(experts / 8)], in which bit ``e % 8`` of byte ``e // 8`` stands for expert e.
    """
    owner = "fused_topk_with_score_function"
    neutral(
        owner,
        qb_histogram=(qb_histogram, None),
        qb_bin_bounds=(qb_bin_bounds, None),
        qb_histogram_mode=(qb_histogram_mode, None),
    )
    form = _format(owner, routing_map_format)
    if topk_indices is not None:
        _check_indices(owner, topk_indices, (*logits.shape[:-1], topk), logits.device)
    routing = topk_router_dense(
        logits, topk, score_function=score_function, use_pre_softmax=use_pre_softmax,
        num_groups=num_groups, group_topk=group_topk, scaling_factor=scaling_factor,
        expert_bias=None if expert_bias is None else expert_bias.float(),
    )  # fmt: skip
    if topk_indices is not None:
        topk_indices.copy_(routing.index)
        return routing.probs, topk_indices
    return routing.probs, _map(routing.routing_map, form)


@named_arguments(top_k="topk")
def fused_compute_score_for_moe_aux_loss(
    logits: torch.Tensor,
    topk: int,
    score_function: str,
    routing_map_format: str | int = RoutingMapFormat.BYTEMAP,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses ``topk`` experts for each token, and computes normalised scores of all experts.

    Args:
        logits: [..., experts] float32, float16 or bfloat16.
        topk: number of experts of each token.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus"; the last two are divided by their
            sum over the experts.
        routing_map_format: as in ``fused_topk_with_score_function``.

    Returns:
        routing_map: as from ``fused_topk_with_score_function``.
        scores: [..., experts] float32.
    """
    owner = "fused_compute_score_for_moe_aux_loss"
    form = _format(owner, routing_map_format)
    check_choice(owner, logits, topk, score_function)
    made = run(logits.flatten(0, -2), topk, score_function, ("scores", "routing_map"))
    return _map(made.routing_map.view(logits.shape), form), made.scores.view(logits.shape)


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
        ValueError: ``probs`` is not a matrix, or ``tokens_per_expert`` does not have its columns.
    """
    if probs.dim() != 2 or tokens_per_expert.shape != probs.shape[1:]:
        raise ValueError(
            "fused_moe_aux_loss: tokens_per_expert must have the shape of a row of probs, "
            f"{list(probs.shape[1:])}, got {list(tokens_per_expert.shape)}"
        )
    coeff = coeff * (num_experts / probs.shape[1])
    return load_balance_loss(probs, tokens_per_expert, total_num_tokens, topk, coeff)


def _format(owner: str, value: Any) -> RoutingMapFormat:
    """Returns the ``routing_map_format`` that a string, a number or a member means."""
    names = {"bytemap": RoutingMapFormat.BYTEMAP, "bitmap_u8": RoutingMapFormat.BITMAP_U8}
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise TypeError(
            f"{owner}: routing_map_format must be a string or a RoutingMapFormat, "
            f"got {type(value).__name__}"
        )
    if value not in names and value not in tuple(names.values()):
        raise ValueError(
            f"{owner}: routing_map_format must be 'bytemap' or 'bitmap_u8', got {value!r}"
        )
    return names[value] if isinstance(value, str) else RoutingMapFormat(value)


def _check_indices(
    owner: str, indices: torch.Tensor, shape: tuple[int, ...], device: torch.device
) -> None:
    """Raises TypeError or ValueError unless ``topk_indices`` can take the chosen experts."""
    if indices.dtype not in (torch.int16, torch.int32, torch.int64):
        raise TypeError(f"{owner}: topk_indices must be int16, int32 or int64, got {indices.dtype}")
    if indices.shape != shape or indices.device != device:
        raise ValueError(
            f"{owner}: topk_indices must have shape {list(shape)} on {device}, "
            f"got {list(indices.shape)} on {indices.device}"
        )


def _map(routes: torch.Tensor, form: RoutingMapFormat) -> torch.Tensor:
    """Returns a bool routing map [..., experts] in the form that was asked for."""
    if form is RoutingMapFormat.BYTEMAP:
        return routes
    padded = functional.pad(routes.to(torch.uint8), (0, -routes.shape[-1] % 8))
    places = torch.arange(8, dtype=torch.uint8, device=routes.device)
    return (padded.unflatten(-1, (-1, 8)) << places).sum(-1, dtype=torch.uint8)
