"""cross_entropy: loss and gradient in one kernel, against the formulas that need more passes.

Bytes counted: 4 an element for bf16 (read the logits once, write the gradient once), whether into
new memory or over the logits; 2 for the loss alone; 4 for the gradient from the logits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import harness
import torch
from torch.nn import functional as F

from apex_te.ops import cross_entropy as op

SHAPES = [(16384, 4096), (8192, 32000), (8192, 50257), (4096, 128256), (2048, 262144)]


def liger(x: torch.Tensor, target: torch.Tensor) -> Any:
    """liger-kernel's, which puts the gradient over the logits if these require one."""
    from liger_kernel.ops.cross_entropy import cross_entropy_forward

    return cross_entropy_forward(x, target, None, -100, 0.0, 0.0, "mean", None, False)


@harness.case("cross_entropy", SHAPES)
def rows_of(shape: tuple[int, int]) -> Iterator[harness.Row]:
    def row(function: str, num_bytes: int, call: Any, peers: Any = None) -> harness.Row:
        return harness.measure(f"cross_entropy {function}", shape, num_bytes, call, peers, 20)

    def ours(out: torch.Tensor | None) -> Any:
        return op.cross_entropy_fwd(x, target, grad=out, num_valid=op.count_valid(target))

    x = harness.normal(*shape)
    target = torch.randint(0, shape[1], shape[:1], device="cuda")
    grad, n = torch.empty_like(x), x.numel()
    leaf, copy = x.clone().requires_grad_(), x.clone().requires_grad_()
    compiled = harness.compiled(F.cross_entropy)
    peers: harness.Peers = {
        "torch": lambda: torch.autograd.grad(F.cross_entropy(leaf, target), leaf),
        "compile": lambda: torch.autograd.grad(compiled(leaf, target), leaf),
        "liger": lambda: liger(copy, target),
    }
    yield row("fwd + bwd", n * 4, lambda: ours(grad), peers)
    yield row("over the logits", n * 4, lambda: ours(x))
    x.copy_(leaf.detach())
    stats = torch.empty(shape[0], 2, device="cuda")
    op.cross_entropy_fwd(x, target, stats=stats)
    one, third = torch.ones(1, device="cuda"), torch.full((1,), 1 / 3, device="cuda")
    backward = functools.partial(op.cross_entropy_bwd, x, target, stats)
    yield row("bwd from the logits", n * 4, lambda: backward(third, grad, made=False))
    yield row("bwd, nothing to do", 4, lambda: backward(one, grad, made=True))
    peers = {"torch": lambda: F.cross_entropy(x, target)}
    yield row("loss only", n * 2, lambda: ours(None), peers)


@harness.graph_case("cross_entropy", "64x4096")
def small(x: torch.Tensor) -> harness.Peers:
    target, grad = torch.randint(0, 4096, (64,), device="cuda"), torch.empty_like(x)
    call = functools.partial(op.cross_entropy_fwd, x, target, grad=grad)
    return {"graph, warm, one launch": call}
