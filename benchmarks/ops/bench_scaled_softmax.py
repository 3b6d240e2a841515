"""scaled_softmax: forward and backward at memory speed, plain, masked and causal.

Bytes counted for bf16, the fewest: forward 4 an element (read 2, write 2), and the mask once;
backward 6 (read 2 + 2, write 2). Causal: a hidden element is only written, 2 bytes in either
direction. torch.softmax and liger-kernel's apply no scale.

Tried on an H200, TB/s at [4, 32, 2048, 2048] where not said otherwise, beside those of the kernels
as they are: 8 vectors a thread 3.96 and 2 vectors 4.10 (4.25), masked 3.67 and 3.52 (3.98);
exponentials computed again for the store 3.97; one vector a thread where a warp holds the row 3.65
at 256 columns (3.80), causal 2.33 (3.34). Rows that share a row of the mask, one after the other:
3.88 (3.97); masks from 8 MiB on are walked so, 3.83 at [1, 16, 4096, 4096] (3.48 in the order of
memory). Of odd rows: 16-byte windows that reach into the neighbouring rows 3.11 at 2047 columns
(4.05); masks shifted as they arrive 2.62 (3.50).
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

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
    if tuple(x.shape) not in COMPILED:
        return {}
    compiled = harness.compiled(formula)
    return {"compile": lambda: compiled(x, *args)}


def torch_bwd(dy: torch.Tensor, y: torch.Tensor) -> Callable[[], Any]:
    return lambda: torch.ops.aten._softmax_backward_data(dy, y, -1, y.dtype)


def liger_fwd(x: torch.Tensor) -> Any:
    from liger_kernel.ops.softmax import _softmax_forward

    return _softmax_forward(x)


def liger_bwd(x: torch.Tensor, dy: torch.Tensor) -> Callable[[], Any]:
    """Raises what liger-kernel raises, on the first call."""
    state: list[Any] = []

    def call() -> Any:
        from liger_kernel.ops.softmax import _softmax_backward, _softmax_forward

        if not state:
            state.extend(_softmax_forward(x))
        return _softmax_backward(dy, *state)

    return call


def plain_rows(shape: tuple[int, ...]) -> Iterator[harness.Row]:
    """Scaled, forward and backward, and masked."""
    x, dy = (harness.normal(*shape) for _ in range(2))
    n, mask = x.numel(), torch.rand(shape[0], 1, *shape[2:], device="cuda") < 0.3
    y, out = scaled_softmax_fwd(x, SCALE), torch.empty_like(x)
    forward = functools.partial(scaled_softmax_fwd, x, SCALE, out=out)
    backward = functools.partial(scaled_softmax_bwd, dy, y, SCALE, out=out)
    peers = {
        "torch": lambda: torch.softmax(x, -1),
        "liger": lambda: liger_fwd(x),
        **compile_peer(scaled_softmax, x),
    }
    yield harness.measure("scaled fwd", shape, n * 4, forward, peers, repeats=20)
    peers = {"torch": torch_bwd(dy, y), "liger": liger_bwd(x, dy)}
    yield harness.measure("scaled bwd", shape, n * 6, backward, peers, repeats=20)
    masked = functools.partial(forward, mask=mask)
    peers = {"torch": lambda: masked_softmax(x, mask), **compile_peer(masked_softmax, x, mask)}
    num_bytes = n * 4 + mask.numel()
    yield harness.measure("scaled masked fwd", shape, num_bytes, masked, peers, repeats=20)


def causal_rows(causal: str, shape: tuple[int, int, int]) -> Iterator[harness.Row]:
    kind = "causal" if causal == "upper_left" else "causal bottom right"
    _, queries, cols = shape
    x, dy = (harness.normal(*shape) for _ in range(2))
    y, out = scaled_softmax_fwd(x, SCALE, causal=causal), torch.empty_like(x)
    hidden = torch.ones(queries, cols, dtype=torch.bool, device="cuda").triu(1 + cols - queries)
    n, seen = x.numel(), x.numel() - shape[0] * int(hidden.sum())
    forward = functools.partial(scaled_softmax_fwd, x, SCALE, causal=causal, out=out)
    backward = functools.partial(scaled_softmax_bwd, dy, y, SCALE, causal=causal, out=out)
    peers = {"torch": lambda: masked_softmax(x, hidden), **compile_peer(masked_softmax, x, hidden)}
    yield harness.measure(f"{kind} fwd", shape, 2 * seen + 2 * n, forward, peers, repeats=20)
    peers = {"torch": torch_bwd(dy, y)}
    yield harness.measure(f"{kind} bwd", shape, 4 * seen + 2 * n, backward, peers, repeats=20)


def small_rows() -> Iterator[harness.Row]:
    """64 x 4096, warm, in a CUDA graph of 100 calls."""
    x = harness.normal(1, 64, 4096)
    y, out = scaled_softmax_fwd(x, SCALE), torch.empty_like(x)
    mask = torch.rand(1, 64, 4096, device="cuda") < 0.3
    calls = {
        "scaled fwd": lambda: scaled_softmax_fwd(x, SCALE, out=out),
        "scaled masked fwd": lambda: scaled_softmax_fwd(x, SCALE, mask, out=out),
        "scaled bwd": lambda: scaled_softmax_bwd(x, y, SCALE, out=out),
    }
    for name, call in calls.items():
        yield harness.in_graph(f"{name}, graph, warm", call, "64x4096")


if __name__ == "__main__":
    plain, causal = map(plain_rows, SHAPES), (causal_rows(*case) for case in CAUSAL)
    parts = itertools.chain(plain, causal, [small_rows()])
    harness.run("scaled_softmax", itertools.chain.from_iterable(parts))
