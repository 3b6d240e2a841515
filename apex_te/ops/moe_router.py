"""Router of a mixture of experts: scores, each token's top-k experts, and the gradients.

``apex_te.router`` has the differentiable functions. One kernel computes all requested outputs, and
another their gradient, from the logits and the chosen experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..runtime.router_options import score_number
from .binding import bind, checked

_fwd = bind("moe_router", "moe_router_fwd")
_bwd = bind("moe_router", "moe_router_bwd")

SMALLEST = 1e-20  # added to sums of scores, which are divided by (csrc/moe_router/moe_router.h)


class RouterOutputs(NamedTuple):
    """Outputs of ``moe_router_fwd``; those that were not requested are None.

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

    index: torch.Tensor  # type: ignore[assignment]  # tuples have a method of the name
    probs: Any = None
    dense_probs: Any = None
    routing_map: Any = None
    scores: Any = None
    lse: Any = None
    counts: Any = None


@checked
def moe_router_fwd(
    logits: torch.Tensor,
    top_k: int,
    score_function: str = "softmax",
    *,
    outputs: tuple[str, ...] = ("probs", "counts"),
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    expert_bias: torch.Tensor | None = None,
    sequences: int = 1,
    sequence_first: bool = False,
) -> RouterOutputs:
    """Selects the experts of each token and computes the requested outputs, without autograd.

    Args:
        logits: [tokens, experts] float32, float16 or bfloat16; at most 1024 experts.
        top_k: number of experts of each token; 0 selects none.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus".
        outputs: names of fields of ``RouterOutputs``; ``index`` is always computed.
        use_pre_softmax, num_groups, group_topk, scaling_factor: as in
            ``apex_te.router.topk_router``.
        expert_bias: [experts] float32, added to the scores for the selection only.
        sequences: number of sequences of equal length, which ``counts`` counts separately.
        sequence_first: tokens are ordered [sequence length, sequences], not [sequences, sequence
            length].

    Returns:
        The index and the requested outputs.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or option does not match.
        NotImplementedError: there are more than 1024 experts.
    """
    score = score_number("moe_router_fwd", score_function, use_pre_softmax)
    rows, experts = logits.shape
    forms = {
        "probs": ((rows, top_k), torch.float32),
        "dense_probs": ((rows, experts), logits.dtype),
        "routing_map": ((rows, experts), torch.bool),
        "scores": ((rows, experts), torch.float32),
        "lse": ((rows,), torch.float32),
        "counts": ((sequences, experts), torch.int32),
    }
    index = logits.new_empty((rows, top_k), dtype=torch.int32)
    made = [
        logits.new_empty(shape, dtype=dtype) if name in outputs else None
        for name, (shape, dtype) in forms.items()
    ]
    _fwd(
        logits.contiguous(), None if expert_bias is None else expert_bias.contiguous(), index,
        *made, score, num_groups or 0, group_topk or 0, scaling_factor or 1.0, sequence_first,
    )  # fmt: skip
    return RouterOutputs(index, *made)


@checked
def moe_router_bwd(
    logits: torch.Tensor,
    index: torch.Tensor,
    score_function: str = "softmax",
    *,
    grad_probs: torch.Tensor | None = None,
    grad_dense_probs: torch.Tensor | None = None,
    grad_scores: torch.Tensor | None = None,
    grad_lse: torch.Tensor | None = None,
    use_pre_softmax: bool = False,
    scaling_factor: float | None = None,
) -> torch.Tensor:
    """Computes the gradient of the logits from those of ``RouterOutputs``, in one kernel.

    A gradient of None counts as zeros.

    Args:
        logits: [tokens, experts], as passed to ``moe_router_fwd``.
        index: [tokens, top_k] int32, from ``moe_router_fwd``.
        score_function, use_pre_softmax, scaling_factor: as passed to ``moe_router_fwd``.
        grad_probs: gradient of ``probs``, float32 [tokens, top_k].
        grad_dense_probs: gradient of ``dense_probs``, [tokens, experts] in the logits' dtype.
        grad_scores: gradient of ``scores``, float32 [tokens, experts]; or [1, experts] if it is the
            same for all tokens.
        grad_lse: gradient of ``lse``, float32 [tokens].

    Returns:
        The gradient, in the shape and dtype of ``logits``.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or option does not match.
    """
    score = score_number("moe_router_bwd", score_function, use_pre_softmax)
    if grad_scores is not None and len(grad_scores) > 1 and grad_scores.stride(0) == 0:
        grad_scores = grad_scores[:1]  # of a sum over tokens: not to be written out for each
    given = [
        None if t is None else t.contiguous()
        for t in (grad_probs, grad_dense_probs, grad_scores, grad_lse)
    ]
    logits = logits.contiguous()
    grad = torch.empty_like(logits)
    _bwd(logits, index.contiguous(), *given, grad, score, scaling_factor or 1.0)
    return grad


def reference(
    logits: torch.Tensor,
    top_k: int,
    score_function: str = "softmax",
    *,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    expert_bias: torch.Tensor | None = None,
    index: torch.Tensor | None = None,
) -> RouterOutputs:
    """Computes ``index``, ``probs``, ``scores`` and ``lse`` in plain PyTorch in the logits' dtype.

    It is differentiable. ``logits`` is [tokens, experts]; options are as in ``moe_router_fwd``.
    ``index``, int64 [tokens, top_k], replaces the choice, which rounding may change.
    """
    if score_function == "softmax":
        scores = normalised = logits.softmax(-1)
        if not use_pre_softmax:
            scores = logits
    elif score_function == "sigmoid":
        scores = logits.sigmoid()
    else:
        scores = torch.nn.functional.softplus(logits, threshold=1000.0).sqrt()
    if score_function != "softmax":
        normalised = scores / (scores.sum(-1, keepdim=True) + SMALLEST)
    if index is None:
        keys = scores.detach() if expert_bias is None else scores.detach() + expert_bias
        index = _chosen(keys, top_k, num_groups, group_topk)
    probs = scores.gather(1, index.long())
    if score_function == "softmax":
        probs = probs if use_pre_softmax else probs.softmax(-1)
    elif top_k > 1:
        probs = probs / (probs.sum(-1, keepdim=True) + SMALLEST)
    probs = probs * (scaling_factor or 1.0)
    return RouterOutputs(index.int(), probs, scores=normalised, lse=logits.logsumexp(-1))


def _chosen(
    keys: torch.Tensor, top_k: int, num_groups: int | None, group_topk: int | None
) -> torch.Tensor:
    """Returns the experts of the largest keys [tokens, experts], equal ones in their order."""
    if group_topk:
        grouped = keys.unflatten(1, (num_groups or 1, -1))
        sums = grouped.sort(dim=-1, descending=True).values[..., : top_k // group_topk].sum(-1)
        best = sums.sort(dim=-1, descending=True, stable=True).indices[:, :group_topk]
        allowed = torch.zeros_like(sums, dtype=torch.bool).scatter(1, best, True)
        keys = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(1)
    return keys.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
