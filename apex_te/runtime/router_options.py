"""Options of the router of a mixture of experts, checked for PyTorch and JAX; no framework."""

from __future__ import annotations

from typing import Any

# As csrc/moe_router/moe_router.h has them.
MAX_EXPERTS = 1024
SCORE_FUNCTIONS = {"softmax": 0, "sigmoid": 2, "sqrtsoftplus": 3}
_PRE_SOFTMAX = 1


def score_number(owner: str, score_function: str, use_pre_softmax: bool) -> int:
    """Returns the kernels' number of a score function; ValueError if there is none."""
    _check_score(owner, score_function)
    if use_pre_softmax and score_function == "softmax":
        return _PRE_SOFTMAX
    return SCORE_FUNCTIONS[score_function]


def _check_score(owner: str, score_function: str) -> None:
    if score_function not in SCORE_FUNCTIONS:
        raise ValueError(
            f"{owner}: score_function must be 'softmax', 'sigmoid' or 'sqrtsoftplus', "
            f"got {score_function!r}"
        )


def check_choice(
    owner: str,
    logits: Any,
    top_k: int,
    score_function: str,
    num_groups: int | None = None,
    group_topk: int | None = None,
) -> None:
    """Raises ValueError or NotImplementedError unless a choice of experts is possible."""
    shape = tuple(logits.shape)
    if len(shape) < 2:
        raise ValueError(f"{owner}: logits must be [..., experts], got {list(shape)}")
    experts = shape[-1]
    if experts > MAX_EXPERTS:
        raise NotImplementedError(
            f"{owner}: logits must have at most {MAX_EXPERTS} experts, got {experts}"
        )
    if not 1 <= top_k <= experts:
        raise ValueError(f"{owner}: top_k must be from 1 to the {experts} experts, got {top_k}")
    _check_score(owner, score_function)
    if not group_topk:
        return
    if not num_groups or num_groups < 1 or experts % num_groups or not 0 < group_topk <= num_groups:
        raise ValueError(
            f"{owner}: num_groups must divide {experts} experts and be at least group_topk, "
            f"{group_topk}, got {num_groups}"
        )
    if not group_topk <= top_k <= group_topk * (experts // num_groups):
        raise ValueError(
            f"{owner}: top_k must be from group_topk, {group_topk}, to the number of experts in "
            f"that many groups, got {top_k}"
        )
