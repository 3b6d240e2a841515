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

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

from apex_te.ops.rope import rope


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


def main() -> None:
    rows = []
    clock = harness.sm_clock_mhz()

    def add(function: str, x: torch.Tensor, peers: Any = None, **options: Any) -> None:
        shape = "x".join(map(str, x.shape))
        call = lambda: rope(x, **options)  # noqa: E731
        rows.append(harness.measure(function, shape, x.numel() * 4, call, peers))

    for shape in [(8192, 2, 32, 128), (4096, 4, 64, 128), (8192, 2, 8, 128), (32768, 1, 32, 64)]:
        x = torch.randn(shape, device="cuda").bfloat16()
        freqs = angles(shape[0], shape[-1])
        cos, sin = (t.bfloat16()[:, None, None] for t in (freqs.cos(), freqs.sin()))
        compiled = harness.compiled(formula)
        by_batch = x.view(shape[1], shape[0], *shape[2:]).clone()
        table = [t.bfloat16()[None] for t in (freqs.cos(), freqs.sin())]
        peers: dict[str, Callable[[], Any]] = {
            "torch": lambda x=x, cos=cos, sin=sin: formula(x, cos, sin),
            "compile": lambda x=x, cos=cos, sin=sin, f=compiled: f(x, cos, sin),
            "liger": lambda x=by_batch, table=table: liger(x, *table),
        }
        add("rope fwd", x, peers, freqs=freqs)
        if shape != (8192, 2, 32, 128):
            continue
        leaf, grad = x.clone().requires_grad_(), torch.randn_like(x)
        out = rope(leaf, freqs)
        bwd = lambda: torch.autograd.grad(out, leaf, grad, retain_graph=True)  # noqa: B023, E731
        rows.append(harness.measure("rope bwd", "8192x2x32x128", x.numel() * 4, bwd))
        add("rope fwd, interleaved", x, freqs=freqs, interleaved=True)
        add("rope fwd, half of d", x, freqs=angles(8192, 64))
        add("rope fwd, cos and sin", x, cos=freqs.cos(), sin=freqs.sin())
        add("rope fwd, in place", x, freqs=freqs, inplace=True)
        cu_seqlens = torch.arange(0, 16385, 1024, dtype=torch.int32, device="cuda")
        add("rope fwd, thd", x.view(16384, 32, 128), freqs=freqs, layout="thd",
            cu_seqlens=cu_seqlens)  # fmt: skip
        qkv = torch.randn(8192, 2, 32, 384, device="cuda").bfloat16()
        add("rope fwd, view of qkv", qkv[..., :128], freqs=freqs)
    small, freqs = torch.randn(64, 1, 32, 128, device="cuda").bfloat16(), angles(64, 128)
    graph = harness.graph_us(lambda: rope(small, freqs))
    rows.append({"function": "graph, warm, one launch", "shape": "64x4096", "us": graph})
    harness.report("rope", rows, sm_clock_mhz=f"{clock} to {harness.sm_clock_mhz()}")


if __name__ == "__main__":
    main()
