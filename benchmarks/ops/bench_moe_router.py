"""moe_router: time over each function's fewest bytes, against PyTorch eager and compiled.

Bytes counted, with ``row`` = experts * element size of the logits and k experts a token:
    topk_router        tokens * (row + 8 k): logits read, probs and index written
    its gradient       tokens * (2 row + 8 k)
    topk_router_dense  tokens * (2 row + experts + 4 k): probs, map and index written
    aux_scores         tokens * (row + 4 experts + 4 k)
    z loss             tokens * (row + 4), a row's logsumexp
8192 tokens of 128 experts are 2 MB in bfloat16: the time is that of a launch and of the top_k
maxima of a warp, one after another. "loss" is the load-balance loss with its scores and gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import harness
import torch

from apex_te import router
from apex_te.ops import moe_router as op

# tokens, experts, top_k, groups, group_topk
SHAPES = [
    (8192, 128, 8, None, None),
    (8192, 256, 8, 8, 4),
    (8192, 160, 6, 8, 3),
    (16384, 64, 2, None, None),
    (8192, 8, 2, None, None),
    (4096, 1024, 16, None, None),
    (256, 128, 8, None, None),
]


def choose(logits: torch.Tensor, bias: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
    scores = logits.float().sigmoid()
    index = (scores + bias).topk(k, dim=-1).indices
    probs = scores.gather(1, index)
    counts = torch.zeros(logits.shape[1], dtype=torch.int64, device=logits.device)
    counts.scatter_add_(0, index.flatten(), torch.ones_like(index.flatten()))
    return probs / (probs.sum(-1, keepdim=True) + 1e-20), index.int(), counts


def losses(logits: torch.Tensor, k: int) -> torch.Tensor:
    scores, counts = router.aux_scores(logits, k)
    loss = router.load_balance_loss(scores, counts, logits.shape[0], k, 1e-2)
    return torch.autograd.grad(loss, logits)[0]


@harness.case("moe_router", *zip(*SHAPES, strict=True))
def rows_of(
    tokens: int, experts: int, k: int, groups: int | None, group_topk: int | None
) -> Iterator[harness.Row]:
    name = f"{tokens} of {experts}, top {k}" + (f", {group_topk} of {groups}" if groups else "")
    x = harness.normal(tokens, experts)
    bias = torch.randn(experts, device="cuda") / 10
    options: dict[str, Any] = {
        "expert_bias": bias, "num_groups": groups, "group_topk": group_topk,
    }  # fmt: skip
    row = experts * x.element_size()
    made = op.moe_router_fwd(x, k, "sigmoid", **options)
    grad = torch.randn(tokens, k, device="cuda")

    def timed(function: str, num_bytes: int, call: Any, peers: Any = None) -> harness.Row:
        return harness.measure(function, name, tokens * num_bytes, call, peers)

    peers = None if groups else harness.formula_peers(choose, x, bias, k)
    forward = lambda: op.moe_router_fwd(x, k, "sigmoid", **options)  # noqa: E731
    yield timed("topk_router, sigmoid", row + 8 * k, forward, peers)
    backward = lambda: op.moe_router_bwd(x, made.index, "sigmoid", grad_probs=grad)  # noqa: E731
    yield timed("topk_router bwd, sigmoid", 2 * row + 8 * k, backward)
    if not groups:
        yield timed("topk_router, softmax", row + 8 * k, lambda: op.moe_router_fwd(x, k))
    dense = lambda: router.topk_router_dense(x, k, score_function="sigmoid", **options)  # noqa: E731
    yield timed("topk_router_dense, sigmoid", 2 * row + experts + 4 * k, dense)
    yield timed("aux_scores", row + 4 * experts + 4 * k, lambda: router.aux_scores(x, k))
    peers = {"torch": lambda: x.float().logsumexp(-1).square().mean() * 1e-3}
    yield timed("z loss", row + 4, lambda: router.router_z_loss(x, 1e-3), peers)
    leaf = x.clone().requires_grad_()
    yield {"function": "loss", "shape": name, **harness.kernel_us(lambda: losses(leaf, k))}


@harness.case("moe_router")
def rows_in_graph() -> Iterator[harness.Row]:
    small = harness.normal(64, 128)
    yield harness.in_graph("topk_router", lambda: op.moe_router_fwd(small, 8), "64x128 in a graph")
