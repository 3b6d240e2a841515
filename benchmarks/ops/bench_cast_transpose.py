"""cast_transpose: bandwidth against a copy of the same bytes in the same run.

What was tried on an H200, 16384x4096 both outputs: 8-byte halves of 32-byte loads (3.17 TB/s);
streaming loads (0.95x); tiles of 128x128 (3.69) and 64x128 (3.67) against 256x128 (3.72); row tiles
first (0.96x); a persistent grid with the next tile's loads in flight (0.97x).

Bytes counted: 4 an element for bf16 to both outputs (read 2, write 1 + 1), 3 for rowwise only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

from apex_te.ops.cast_transpose import cast_transpose

SHAPES = [(16384, 4096), (16384, 14336), (14336, 4096), (4096, 4096), (16384, 3584)]


def variant_call(x: torch.Tensor, variant: str) -> tuple[int, Callable[[], Any]]:
    """Bytes that a variant must move, and the call, with every output preallocated."""
    both = variant.startswith("both")
    make_row, make_col = both or variant == "rowwise", both or variant == "columnwise"
    fp8 = torch.float8_e4m3fn
    one, amax = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
    scale_inv = torch.empty(1, device="cuda")
    row = torch.empty_like(x, dtype=fp8) if make_row else None
    col = x.new_empty(x.shape[::-1], dtype=fp8) if make_col else None

    def call() -> None:
        cast_transpose(
            x,
            one,
            fp8,
            rowwise=make_row,
            columnwise=make_col,
            amax=amax,
            scale_inv=scale_inv,
            with_dbias=variant == "both + dbias",
            out_rowwise=row,
            out_columnwise=col,
        )

    return x.numel() * (2 + make_row + make_col), call


def main() -> None:
    rows = []
    clock = harness.sm_clock_mhz()
    for shape in SHAPES:
        x = torch.randn(shape, device="cuda").bfloat16()
        for variant in ("both", "rowwise", "columnwise", "both + dbias"):
            num_bytes, call = variant_call(x, variant)
            ours, copy = harness.kernel_us(call), harness.copy_us(num_bytes)
            rows.append(
                {
                    "shape": "x".join(map(str, shape)),
                    "outputs": variant,
                    **ours,
                    "TB/s": harness.terabytes_per_second(num_bytes, ours["us"]),
                    "copy us": copy["us"],
                    "of copy": copy["us"] / ours["us"],
                }
            )
    harness.report("cast_transpose", rows, sm_clock_mhz=f"{clock} to {harness.sm_clock_mhz()}")


if __name__ == "__main__":
    main()
