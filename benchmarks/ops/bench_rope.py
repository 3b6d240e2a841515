"""rope: bandwidth against a copy of the same bytes and against the plain formula.

Bytes counted: 4 an element for bf16 (read 2, write 2); the angles, 4 bytes for each position and
element of one head, are left out: 1.5% of 32 heads' bytes at batch 2, shared by the sequences.

What did not help on an H200, us at 8192x2x32x128 / 8192x2x8x128 where a copy_ takes 67.5 / 20.4 and
the kernel as it is 69.3 / 22.4 in the same run: blocks of 128 or 256 threads, 71.0 / 22.8; four
heads a thread at fewer blocks, 70.8 / 22.6; 48 registers for more blocks, 73.2 / 23.3. Earlier
forms: the angles loaded after x, 77.9 / 28.3 (before it, 73.9 / 24.3); one head a thread, 109 / 33:
what comes before the loads then outweighs them; interleaved pairs in two adjacent vectors of a
thread, half a sector for each access, 78 where whole halves of a head take 74.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

from apex_te.ops.rope import rope

SHAPES = [(8192, 2, 32, 128), (4096, 4, 64, 128), (8192, 2, 8, 128), (32768, 1, 32, 64)]


def angles(rows: int, dim: int) -> torch.Tensor:
    inverse = 10000.0 ** (-torch.arange(0, dim, 2, device="cuda") / dim)
    pairs = torch.arange(rows, device="cuda").float()[:, None] * inverse
    return torch.cat((pairs, pairs), 1)


def formula(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def liger(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    """liger-kernel's, which writes over its [b, h, s, d] arguments and wants a key tensor."""
    from liger_kernel.ops.rope import rope_forward

    return rope_forward(x.transpose(1, 2), x[:, :, :1].clone().transpose(1, 2), cos, sin)


def rows_of(shape: tuple[int, ...]) -> Iterator[harness.Row]:
    def row(function: str, x: torch.Tensor, peers: Any = None, **options: Any) -> harness.Row:
        call = functools.partial(rope, x, **options)
        return harness.measure(function, x.shape, x.numel() * 4, call, peers)

    x = harness.normal(*shape)
    freqs = angles(shape[0], shape[-1])
    cos, sin = (t.bfloat16()[:, None, None] for t in (freqs.cos(), freqs.sin()))
    peers = harness.formula_peers(formula, x, cos, sin)
    by_batch = x.view(shape[1], shape[0], *shape[2:]).clone()
    table = [t.bfloat16()[None] for t in (freqs.cos(), freqs.sin())]
    peers["liger"] = lambda: liger(by_batch, *table)
    yield row("rope fwd", x, peers, freqs=freqs)
    if shape != SHAPES[0]:
        return
    leaf, grad = x.clone().requires_grad_(), torch.randn_like(x)
    out = rope(leaf, freqs)
    backward = functools.partial(torch.autograd.grad, out, leaf, grad, retain_graph=True)
    yield harness.measure("rope bwd", shape, x.numel() * 4, backward)
    yield row("rope fwd, interleaved", x, freqs=freqs, interleaved=True)
    yield row("rope fwd, half of d", x, freqs=angles(8192, 64))
    yield row("rope fwd, cos and sin", x, cos=freqs.cos(), sin=freqs.sin())
    yield row("rope fwd, in place", x, freqs=freqs, inplace=True)
    starts = torch.arange(0, 16385, 1024, dtype=torch.int32, device="cuda")
    tokens = x.view(16384, 32, 128)
    yield row("rope fwd, thd", tokens, freqs=freqs, layout="thd", cu_seqlens=starts)
    qkv = harness.normal(8192, 2, 32, 384)
    yield row("rope fwd, view of qkv", qkv[..., :128], freqs=freqs)


def rows() -> Iterator[harness.Row]:
    for shape in SHAPES:
        yield from rows_of(shape)
    small, freqs = harness.normal(64, 1, 32, 128), angles(64, 128)
    yield harness.in_graph("graph, warm, one launch", lambda: rope(small, freqs), "64x4096")


if __name__ == "__main__":
    harness.run("rope", rows())
