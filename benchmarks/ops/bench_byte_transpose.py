"""byte_transpose: bandwidth over the floor's 2 bytes an element, against PyTorch's copy."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

from apex_te.ops.byte_transpose import byte_transpose

SHAPES = [(16384, 4096), (16384, 14336), (8192, 4096), (4096, 4096), (16383, 4095)]


def main() -> None:
    clock = harness.sm_clock_mhz()
    rows = []
    for shape in SHAPES:
        codes = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
        out = codes.new_empty(shape[::-1])
        rows.append(
            harness.measure(
                "byte_transpose",
                "x".join(map(str, shape)),
                2 * codes.numel(),
                lambda c=codes, o=out: byte_transpose(c, out=o),
                {"torch": lambda c=codes, o=out: o.copy_(c.t())},
            )
        )
    small = torch.randint(0, 256, (64, 4096), dtype=torch.uint8, device="cuda")
    us = harness.graph_us(lambda: byte_transpose(small))
    rows.append({"function": "byte_transpose", "shape": "64x4096 in a graph", "us": us})
    harness.report("byte_transpose", rows, sm_clock_mhz=f"{clock} to {harness.sm_clock_mhz()}")


if __name__ == "__main__":
    main()
