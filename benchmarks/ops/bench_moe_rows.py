"""moe_permute: bandwidth over each function's fewest bytes, against PyTorch eager and compiled.

Bytes counted, with ``row`` = hidden * element size and k copies a token:
    permute             tokens * row * (1 + k): each token read once, its copies written
    unpermute           tokens * row * (k + 1), and so permute's gradient
    unpermute_bwd       tokens * row * (1 + 2k): gradient and copies read, k gradients written;
                        the dot products for probs cost nothing more
    sort_chunks         rows * row * 2
The map, int32, is left out: 12 bytes a token and copy where a row of 4096 bf16 has 8192.

PyTorch's way: a stable argsort of the experts and index_select, then for the sum either index_add
("torch") or a gather by the inverse order and a sum over k, compiled ("compile").

moe_router: time over each function's fewest bytes, against PyTorch eager and compiled.

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

import functools
from collections.abc import Iterator
from typing import Any

import harness
import torch

from apex_te import router
from apex_te.ops import moe_permute as op
from apex_te.ops import moe_router as routing

# tokens, hidden, experts, k
SHAPES = [
    (16384, 4096, 64, 2),
    (16384, 2048, 128, 8),
    (4096, 2048, 256, 8),
    (4096, 4096, 256, 8),
    (4096, 5120, 256, 8),
    (4096, 7168, 256, 8),
    (2048, 4096, 8, 2),
    (16384, 4095, 64, 2),
]
OTHER_DTYPES = (4096, 7168)  # measured in float32 and in bytes, too


def permute(x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    order = index.flatten().argsort(stable=True)
    return x.index_select(0, order // index.shape[1]), order


def rows_in_order(x: torch.Tensor, order: torch.Tensor, k: int) -> torch.Tensor:
    return x.index_select(0, order // k)


def add(y: torch.Tensor, order: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    tokens, k = probs.shape
    y = y * probs.flatten()[order].unsqueeze(1).to(y.dtype)
    return y.new_zeros(tokens, y.shape[1]).index_add_(0, order // k, y)


def gather_sum(y: torch.Tensor, inverse: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    tokens, k = probs.shape
    return (y[inverse].view(tokens, k, -1) * probs.unsqueeze(2)).sum(1).to(y.dtype)


@harness.case("moe_permute", *zip(*SHAPES, strict=True))
def rows_of(tokens: int, hidden: int, experts: int, k: int) -> Iterator[harness.Row]:
    shape = f"{tokens}x{hidden}, top {k} of {experts}"
    index = torch.rand(tokens, experts, device="cuda").topk(k, 1).indices.int()
    index = index.sort(1).values  # the order of experts, as a mask has it
    mask = torch.zeros(tokens, experts, dtype=torch.bool, device="cuda")
    mask.scatter_(1, index.long(), True)
    probs = torch.rand(tokens, k, device="cuda")
    dense = torch.zeros(tokens, experts, device="cuda").scatter_(1, index.long(), probs)
    x = harness.normal(tokens, hidden)
    copies = tokens * k
    ids = op.make_map(mask).row_id_map
    y, pp = op.permute(x, ids, copies, dense)
    order = permute(x, index)[1]
    inverse = order.argsort()

    def row(name: str, units: int, call: Any, peers: Any = None, size: int = 2) -> harness.Row:
        # compiling takes seconds
        is_compared = tokens == 16384 and (hidden != 4095 or name.startswith("unpermute"))
        if peers and not is_compared:
            peers = {"torch": peers["torch"]}
        return harness.measure(name, shape, tokens * hidden * size * units, call, peers)

    move, back = functools.partial(op.permute, x, ids), functools.partial(op.unpermute, y, ids)
    peers = harness.formula_peers(permute, x, index)
    yield row("permute and its map", 1 + k, lambda: op.permute_by(x, mask, copies), peers)
    peers = harness.formula_peers(rows_in_order, x, order, k)
    yield row("permute", 1 + k, lambda: move(copies), peers)
    peers = harness.formula_peers(gather_sum, y, inverse, probs)
    peers["torch"] = lambda: add(y, order, probs)
    yield row("unpermute, probs", 1 + k, lambda: back(dense), peers)
    yield row("permute bwd, probs", 1 + k, lambda: op.permute_bwd(y, ids, pp))
    yield row("unpermute bwd, probs", 1 + 2 * k, lambda: op.unpermute_bwd(x, y, ids, dense))
    us = harness.kernel_us(lambda: op.make_map(mask))
    yield {"function": "map alone", "shape": shape, **us}
    codes = x.view(torch.uint8)[:, :hidden].contiguous()
    permute_bytes = functools.partial(op.permute, codes, ids, copies)
    if (tokens, hidden) == OTHER_DTYPES:
        wide = functools.partial(op.permute, x.float(), ids, copies)
        yield row("permute, float32", 1 + k, wide, size=4)
        unpermute_wide = functools.partial(op.unpermute, y.float(), ids, dense)
        yield row("unpermute, probs, float32", 1 + k, unpermute_wide, size=4)
        yield row("permute, bytes", 1 + k, permute_bytes, size=1)
    if (tokens, hidden) != (16384, 4096):
        return
    fixed = copies + experts * 16
    padded = functools.partial(op.permute_by, x, mask, fixed, dense, align_size=16)
    yield row("permute, padded to 16, and its map", 1 + k, padded)
    by_index = functools.partial(op.permute_by, x, index, copies, map_type="index", num_experts=64)
    yield row("permute and its map, indices", 1 + k, by_index)
    yield row("permute, bytes", 1 + k, permute_bytes, size=1)
    sizes = torch.full((64,), copies // 64, dtype=torch.int32, device="cuda")
    sorted_index = torch.arange(64, device="cuda").view(8, 8).t().flatten().int()
    chunk_map = op.make_chunk_map(sizes, sorted_index, copies)
    by = chunk_map[0].long()
    peers = {"torch": lambda: y.index_select(0, by)}
    yield row("sort_chunks", 2 * k, lambda: op.sort_chunks(y, chunk_map), peers)
    us = harness.kernel_us(lambda: op.make_chunk_map(sizes, sorted_index, copies))
    yield {"function": "chunk map alone", "shape": "32768 rows of 64 chunks", **us}


@harness.graph_case("moe_permute")
def small(x: torch.Tensor) -> harness.Peers:
    index = torch.rand(64, 8, device="cuda").topk(2, 1).indices
    mask = torch.zeros(64, 8, dtype=torch.bool, device="cuda").scatter_(1, index, True)
    return {"permute and its map": functools.partial(op.permute_by, x, mask, 128)}


# tokens, experts, top_k, groups, group_topk
ROUTED = [
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


@harness.case("moe_router", *zip(*ROUTED, strict=True))
def router_rows(
    tokens: int, experts: int, k: int, groups: int | None, group_topk: int | None
) -> Iterator[harness.Row]:
    name = f"{tokens} of {experts}, top {k}" + (f", {group_topk} of {groups}" if groups else "")
    x = harness.normal(tokens, experts)
    bias = torch.randn(experts, device="cuda") / 10
    options: dict[str, Any] = {"num_groups": groups, "group_topk": group_topk, "expert_bias": bias}
    row = experts * x.element_size()
    made = routing.moe_router_fwd(x, k, "sigmoid", **options)
    grad = torch.randn(tokens, k, device="cuda")

    def timed(function: str, num_bytes: int, call: Any, peers: Any = None) -> harness.Row:
        return harness.measure(function, name, tokens * num_bytes, call, peers)

    peers = None if groups else harness.formula_peers(choose, x, bias, k)
    forward = lambda: routing.moe_router_fwd(x, k, "sigmoid", **options)  # noqa: E731
    yield timed("topk_router, sigmoid", row + 8 * k, forward, peers)
    backward = lambda: routing.moe_router_bwd(x, made.index, "sigmoid", grad_probs=grad)  # noqa: E731
    yield timed("topk_router bwd, sigmoid", 2 * row + 8 * k, backward)
    if not groups:
        yield timed("topk_router, softmax", row + 8 * k, lambda: routing.moe_router_fwd(x, k))
    dense = lambda: router.topk_router_dense(x, k, score_function="sigmoid", **options)  # noqa: E731
    yield timed("topk_router_dense, sigmoid", 2 * row + experts + 4 * k, dense)
    yield timed("aux_scores", row + 4 * experts + 4 * k, lambda: router.aux_scores(x, k))
    peers = {"torch": lambda: x.float().logsumexp(-1).square().mean() * 1e-3}
    yield timed("z loss", row + 4, lambda: router.router_z_loss(x, 1e-3), peers)
    leaf = x.clone().requires_grad_()
    yield {"function": "loss", "shape": name, **harness.kernel_us(lambda: losses(leaf, k))}


@harness.graph_case("moe_router", "64x128 in a graph", (64, 128))
def small_router(x: torch.Tensor) -> harness.Peers:
    return {"topk_router": lambda: routing.moe_router_fwd(x, 8)}
