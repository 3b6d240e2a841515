"""current_scale: bandwidth over the floor's bytes, against torch eager and torch.compile.

Bytes counted for an element of bf16: read 2 twice, write 1 for each layout: 6 for both, 5 for one.
What the second kernel finds in the L2 cache is not subtracted, so a figure may exceed a copy's.

What was tried on an H200, both layouts, TB/s at 16384x4096 and at 4096x4096 (32 MB: fits in L2),
against 3.76 and 3.43: the second kernel in the order of the first (3.70, 3.31), started when the
first ends (3.74, 3.31) or by an ordinary launch (3.68, 3.14); tiles of 128x128 (3.70, 3.25); 8
loads a thread for the amax (3.75, 3.39), with half the blocks (3.80, 3.38).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

from apex_te.ops.current_scale import current_scale, tensor_amax

SHAPES = [(16384, 4096), (16384, 14336), (14336, 4096), (4096, 4096), (2048, 4096)]
E4M3 = torch.float8_e4m3fn


def plain(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The formula in PyTorch, both layouts."""
    amax = x.abs().max().float()
    scale = 448.0 / amax
    codes = (x.float() * scale).clamp(-448, 448).to(E4M3)
    return codes, codes.t().contiguous(), scale, 1.0 / scale


def rows_of(shape: tuple[int, int], with_peers: bool) -> list[dict[str, Any]]:
    x = torch.randn(shape, device="cuda").bfloat16()
    n, name = x.numel(), "x".join(map(str, shape))
    row = torch.empty_like(x, dtype=E4M3)
    col = x.new_empty(shape[::-1], dtype=E4M3)
    amax = tensor_amax(x)
    rows = []
    for layout in ("both", "rowwise", "columnwise"):
        outputs = {
            "rowwise": layout != "columnwise",
            "columnwise": layout != "rowwise",
            "out_rowwise": row if layout != "columnwise" else None,
            "out_columnwise": col if layout != "rowwise" else None,
        }
        written = outputs["rowwise"] + outputs["columnwise"]
        peers = {}
        if with_peers and layout == "both":
            fused = harness.compiled(plain)
            peers = {"torch": lambda: plain(x), "compile": lambda f=fused: f(x)}
        rows.append(
            harness.measure(
                f"current_scale {layout}", name, n * (4 + written),
                lambda o=outputs: current_scale(x, E4M3, **o), peers,
            )
        )  # fmt: skip
        rows.append(
            harness.measure(
                f"current_scale {layout}, amax given", name, n * (2 + written),
                lambda o=outputs: current_scale(x, E4M3, amax=amax, **o),
            )
        )  # fmt: skip
    rows.append(harness.measure("tensor_amax", name, 2 * n, lambda: tensor_amax(x)))
    return rows


def main() -> None:
    clock = harness.sm_clock_mhz()
    rows = []
    for shape in SHAPES:
        rows += rows_of(shape, with_peers=shape == SHAPES[0])
    x = torch.randn(64, 4096, device="cuda").bfloat16()
    for layout in ("both", "rowwise"):
        small = harness.graph_us(
            lambda both=layout == "both": current_scale(x, E4M3, columnwise=both)
        )
        function = f"current_scale {layout}"
        rows.append({"function": function, "shape": "64x4096 in a graph", "us": small})
    harness.report("current_scale", rows, sm_clock_mhz=f"{clock} to {harness.sm_clock_mhz()}")


if __name__ == "__main__":
    main()
