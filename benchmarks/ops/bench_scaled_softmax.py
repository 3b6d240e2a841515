"""scaled_softmax: forward and backward at memory speed, plain, masked and causal.

Bytes counted for bf16, the fewest: forward 4 an element (read 2, write 2), and the mask once;
backward 6 (read 2 + 2, write 2). Causal: a hidden element is only written, 2 bytes in either
direction. torch.softmax and liger-kernel's apply no scale.

``attention_sink``: the pass that adds sinks to attention's output, its gradient, and the pass that
joins two outputs.
Bytes counted, bf16 and d elements a query: forward 4 d + 8 (read and write the output, read the
log-sum-exp, write the total), backward 4 d + 4 (read the output, its gradient and the total), join
6 d + 12. The shapes are the outputs of gpt-oss's layers (64 heads of 64) and of heads of 128, in
the memory order of sbhd, bshd and bhsd.

Tried for a layer's sinks beside a window of 127 tokens, where two passes over 268 MB cost 87 us
(76 for copies of as many bytes): blocks that begin with the heads that attention has written last,
41 and 47 us instead of 43 and 44; blocks of 128 threads, 40 and 46.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import harness
import torch

from apex_te.ops import attention_sink as sinks
from apex_te.ops.scaled_softmax import scaled_softmax_bwd, scaled_softmax_fwd

SCALE = 0.125
SHAPES = [
    (4, 32, 2048, 2048), (4, 32, 2047, 2047), (1, 16, 4096, 4096), (1, 32, 1024, 8192),
    (1, 8, 2048, 16384), (64, 16, 197, 197),
]  # fmt: skip
# name of the option, [N, Sq, Sk]
CAUSAL = [
    ("upper_left", (128, 2048, 2048)), ("upper_left", (32, 4096, 4096)),
    ("upper_left", (8, 8192, 8192)), ("upper_left", (128, 2047, 2047)),
    ("bottom_right", (128, 1024, 2048)), ("bottom_right", (32, 512, 8192)),
]  # fmt: skip
COMPILED = {(4, 32, 2048, 2048), (1, 8, 2048, 16384), (128, 2048, 2048), (32, 512, 8192)}


def scaled_softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * SCALE, -1)


def masked_softmax(x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return torch.softmax((x * SCALE).masked_fill(hidden, -torch.inf), -1)


def compile_peer(
    formula: Callable[..., Any], x: torch.Tensor, *args: torch.Tensor
) -> harness.Peers:
    """torch.compile of the formula, for a few shapes: it takes seconds."""
    return harness.compile_peer(formula, x, *args) if tuple(x.shape) in COMPILED else {}


def torch_bwd(dy: torch.Tensor, y: torch.Tensor) -> Callable[[], Any]:
    return lambda: torch.ops.aten._softmax_backward_data(dy, y, -1, y.dtype)


def liger_fwd(x: torch.Tensor) -> Any:
    from liger_kernel.ops.softmax import _softmax_forward

    return _softmax_forward(x)


def liger_bwd(x: torch.Tensor, dy: torch.Tensor) -> Callable[[], Any]:
    """Raises what liger-kernel raises, on the first call."""
    state = cache(lambda: liger_fwd(x))

    def call() -> Any:
        from liger_kernel.ops.softmax import _softmax_backward

        return _softmax_backward(dy, *state())

    return call


@harness.case("scaled_softmax", SHAPES)
def plain_rows(shape: tuple[int, ...]) -> Iterator[harness.Row]:
    """Scaled, forward and backward, and masked."""
    x, dy = (harness.normal(*shape) for _ in range(2))
    n, mask = x.numel(), torch.rand(shape[0], 1, *shape[2:], device="cuda") < 0.3
    y, out = scaled_softmax_fwd(x, SCALE), torch.empty_like(x)
    forward = partial(scaled_softmax_fwd, x, SCALE, out=out)
    backward = partial(scaled_softmax_bwd, dy, y, SCALE, out=out)
    peers = {"torch": lambda: torch.softmax(x, -1), "liger": lambda: liger_fwd(x)}
    peers |= compile_peer(scaled_softmax, x)
    yield harness.measure("scaled fwd", shape, n * 4, forward, peers, repeats=20)
    peers = {"torch": torch_bwd(dy, y), "liger": liger_bwd(x, dy)}
    yield harness.measure("scaled bwd", shape, n * 6, backward, peers, repeats=20)
    masked = partial(forward, mask=mask)
    peers = {"torch": lambda: masked_softmax(x, mask), **compile_peer(masked_softmax, x, mask)}
    num_bytes = n * 4 + mask.numel()
    yield harness.measure("scaled masked fwd", shape, num_bytes, masked, peers, repeats=20)


@harness.case("scaled_softmax", *zip(*CAUSAL, strict=True))
def causal_rows(causal: str, shape: tuple[int, int, int]) -> Iterator[harness.Row]:
    kind = "causal" if causal == "upper_left" else "causal bottom right"
    _, queries, cols = shape
    x, dy = (harness.normal(*shape) for _ in range(2))
    y, out = scaled_softmax_fwd(x, SCALE, causal=causal), torch.empty_like(x)
    hidden = torch.ones(queries, cols, dtype=torch.bool, device="cuda").triu(1 + cols - queries)
    n, seen = x.numel(), x.numel() - shape[0] * int(hidden.sum())
    forward = partial(scaled_softmax_fwd, x, SCALE, causal=causal, out=out)
    backward = partial(scaled_softmax_bwd, dy, y, SCALE, causal=causal, out=out)
    peers = {"torch": lambda: masked_softmax(x, hidden), **compile_peer(masked_softmax, x, hidden)}
    yield harness.measure(f"{kind} fwd", shape, 2 * seen + 2 * n, forward, peers, repeats=20)
    peers = {"torch": torch_bwd(dy, y)}
    yield harness.measure(f"{kind} bwd", shape, 4 * seen + 2 * n, backward, peers, repeats=20)


@harness.graph_case("scaled_softmax", "64x4096", (1, 64, 4096))
def small(x: torch.Tensor) -> harness.Peers:
    y, out = scaled_softmax_fwd(x, SCALE), torch.empty_like(x)
    mask = torch.rand(1, 64, 4096, device="cuda") < 0.3
    forward = partial(scaled_softmax_fwd, x, SCALE, out=out)
    return {
        "scaled fwd, graph, warm": forward,
        "scaled masked fwd, graph, warm": partial(forward, mask=mask),
        "scaled bwd, graph, warm": lambda: scaled_softmax_bwd(x, y, SCALE, out=out),
    }


# [b, h, s, d], and the order of these in memory
SINKS = [
    ((2, 64, 4096, 64), "bshd"), ((2, 32, 4096, 128), "bshd"), ((2, 32, 4096, 128), "sbhd"),
    ((2, 32, 4096, 128), "bhsd"), ((1, 128, 4096, 128), "sbhd"), ((2, 16, 4096, 256), "bshd"),
]  # fmt: skip


def gradient(
    dout: torch.Tensor, out: torch.Tensor, total: torch.Tensor, sink: torch.Tensor
) -> torch.Tensor:
    """The formula of backward."""
    delta = (dout.float() * out.float()).sum(-1)
    return -((sink[:, None] - total).exp() * delta).sum((0, 2))


def heads(shape: tuple[int, ...], layout: str) -> torch.Tensor:
    """A tensor [b, h, s, d] in the memory order of ``layout``."""
    sizes = dict(zip("bhsd", shape, strict=True))
    x = harness.normal(*(sizes[letter] for letter in layout))
    return x.permute([layout.index(letter) for letter in "bhsd"])


@harness.case("attention_sink")
def sink_rows() -> Iterator[harness.Row]:
    for shape, layout in SINKS:
        out, dout, lse = heads(shape, layout), heads(shape, layout), torch.randn(shape[:3]).cuda()
        sink = torch.randn(shape[1]).cuda()
        low = sink - 100.0  # which leaves the output as it is, call after call
        name, queries, d = f"{harness.text_of(shape)} {layout}", lse.numel(), shape[3]
        call = partial(sinks.attention_sink_fwd, out, lse, low, out=out)
        peers = harness.formula_peers(sinks.reference, out, lse, low)
        yield harness.measure("attention_sink fwd", name, queries * (4 * d + 8), call, peers)
        call = partial(sinks.attention_join, out, lse, dout, lse, out=out)
        peers = harness.formula_peers(sinks.reference_join, (out, lse), (dout, lse))
        yield harness.measure("attention_join", name, queries * (6 * d + 12), call, peers)
        call = partial(sinks.attention_sink_bwd, dout, out, lse, sink)
        peers = harness.formula_peers(gradient, dout, out, lse, sink)
        yield harness.measure("attention_sink bwd", name, queries * (4 * d + 4), call, peers)
