"""block_quantize: bandwidth over the floor's bytes, against torch eager and torch.compile.

Floor in bytes an element of bf16: read 2, write 1 for each layout; with 1x128 blocks 4 more for
128 elements of each layout. Dequantize to bf16: read 1 and the scales, write 2.

What did not help, at 16384x4096 on an H200, us for both layouts: 2 or 4 blocks of an SM instead of
3 (1x128: 81.5, 81.9 against 74.8), 3 or 5 instead of 4 (128x128: 73.2, 78.9 against 72.9).
Dequantize: 8 or 16 rows of a thread instead of 4 (55.6, 55.1 against 54.1), 256 or 512 threads
instead of 128 (54.6, 54.4).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

from apex_te.ops.block_quantize import block_dequantize, block_quantize

SHAPES = [(16384, 4096), (16384, 14336), (4096, 4096), (16384, 3584)]
E4M3 = torch.float8_e4m3fn


def plain(x: torch.Tensor, block_rows: int) -> list[torch.Tensor]:
    """The formula in PyTorch, both layouts, for extents that are multiples of 128."""
    out = []
    for t in (x, x.t()):
        blocks = t.reshape(t.shape[0] // block_rows, block_rows, t.shape[1] // 128, 128).float()
        scale = 448.0 / blocks.abs().amax((1, 3), keepdim=True)
        codes = (blocks * scale).clamp(-448, 448).to(E4M3).view(t.shape)
        inverse = (1.0 / scale).squeeze(3).squeeze(1)
        out += [codes, inverse.t().contiguous() if block_rows == 1 else inverse]
    return out


def rows_of(shape: tuple[int, int], with_peers: bool) -> list[dict[str, Any]]:
    x = torch.randn(shape, device="cuda").bfloat16()
    n, name = x.numel(), "x".join(map(str, shape))
    rows = []
    for block_rows, blocks in ((1, "1x128"), (128, "128x128")):
        scales = n // 128 * 4 if block_rows == 1 else 0
        for layout in ("both", "rowwise", "columnwise"):
            options = {"rowwise": layout != "columnwise", "columnwise": layout != "rowwise"}
            out = block_quantize(x, E4M3, block_rows=block_rows, **options)

            def call(out=out, block_rows=block_rows, options=options) -> None:
                block_quantize(x, E4M3, block_rows=block_rows, out=out, **options)

            peers: dict[str, Callable[[], Any]] = {}
            if with_peers and layout == "both":
                fused = harness.compiled(plain)
                peers["torch"] = lambda block_rows=block_rows: plain(x, block_rows)
                peers["compile"] = lambda f=fused, block_rows=block_rows: f(x, block_rows)
            num_bytes = n * (2 + sum(options.values())) + scales * sum(options.values())
            rows.append(
                harness.measure(f"block_quantize {blocks} {layout}", name, num_bytes, call, peers)
            )
        out = block_quantize(x, E4M3, block_rows=block_rows, columnwise=False)
        back = torch.empty_like(x)

        def dequantize(out=out, back=back, block_rows=block_rows) -> None:
            block_dequantize(*out[:2], block_rows=block_rows, out=back)

        rows.append(harness.measure(f"block_dequantize {blocks}", name, 3 * n + scales, dequantize))
    return rows


def main() -> None:
    clock = harness.sm_clock_mhz()
    rows = []
    for shape in SHAPES:
        rows += rows_of(shape, with_peers=shape == SHAPES[0])
    x = torch.randn(64, 4096, device="cuda").bfloat16()
    for block_rows, blocks in ((1, "1x128"), (128, "128x128")):
        out = block_quantize(x, E4M3, block_rows=block_rows)
        small = harness.graph_us(
            lambda out=out, b=block_rows: block_quantize(x, E4M3, block_rows=b, out=out)
        )
        function = f"block_quantize {blocks} both"
        rows.append({"function": function, "shape": "64x4096 in a graph", "us": small})
    back = torch.empty_like(x)
    out = block_quantize(x, E4M3)
    small = harness.graph_us(lambda: block_dequantize(*out[:2], out=back))
    rows.append({"function": "block_dequantize 1x128", "shape": "64x4096 in a graph", "us": small})
    harness.report("block_quantize", rows, sm_clock_mhz=f"{clock} to {harness.sm_clock_mhz()}")


if __name__ == "__main__":
    main()
