"""cast_transpose: bandwidth against a copy of the same bytes in the same run.

What was tried on an H200, 16384x4096 both outputs: 8-byte halves of 32-byte loads (3.17 TB/s);
streaming loads (0.95x); tiles of 128x128 (3.69) and 64x128 (3.67) against 256x128 (3.72); row tiles
first (0.96x); a persistent grid with the next tile's loads in flight (0.97x).

Bytes counted: 4 an element for bf16 to both outputs (read 2, write 1 + 1), 3 for rowwise only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

from apex_te.ops.cast_transpose import cast_transpose

E4M3 = torch.float8_e4m3fn
SHAPES = [(16384, 4096), (16384, 14336), (14336, 4096), (4096, 4096), (16384, 3584)]


def rows_of(shape: tuple[int, int]) -> Iterator[harness.Row]:
    x = harness.normal(*shape)
    one, amax = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
    scale_inv = torch.empty(1, device="cuda")
    layouts = {name: (copies, outputs) for name, copies, outputs in harness.layouts(x, E4M3)}
    layouts["both + dbias"] = (2, {**layouts["both"][1], "with_dbias": True})
    for name, (copies, options) in layouts.items():
        num_bytes = x.numel() * (2 + copies)
        ours = harness.kernel_us(
            lambda o=options: cast_transpose(x, one, E4M3, amax=amax, scale_inv=scale_inv, **o)
        )
        copy = harness.copy_us(num_bytes)
        yield {
            "shape": harness.text_of(shape),
            "outputs": name,
            **ours,
            "TB/s": harness.terabytes_per_second(num_bytes, ours["us"]),
            "copy us": copy["us"],
            "of copy": copy["us"] / ours["us"],
        }


if __name__ == "__main__":
    harness.run("cast_transpose", (row for shape in SHAPES for row in rows_of(shape)))
