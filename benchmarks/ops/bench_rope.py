"""rope: bandwidth against a copy of the same bytes and against the plain formula.

Bytes counted: 4 an element for bf16 (read 2, write 2); the angles, 4 bytes for each position and
element of one head, are left out: 1.5% of 32 heads' bytes at batch 2, shared by the sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import harness
import torch

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


@harness.case("rope", SHAPES)
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
    backward = harness.backward(functools.partial(rope, freqs=freqs), [x])
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


@harness.graph_case("rope", "64x4096", (64, 1, 32, 128))
def small(x: torch.Tensor) -> harness.Peers:
    freqs = angles(64, 128)
    return {"graph, warm, one launch": lambda: rope(x, freqs)}
