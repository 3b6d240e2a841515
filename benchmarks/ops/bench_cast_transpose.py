"""cast_transpose: bandwidth against a copy of the same bytes in the same run.

Bytes counted: 4 an element for bf16 to both outputs (read 2, write 1 + 1), 3 for rowwise only.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

from apex_te.ops.cast_transpose import cast_transpose

SHAPES = [(16384, 4096), (16384, 14336), (14336, 4096), (4096, 4096), (16384, 3584)]


def main() -> None:
    rows = []
    clock = harness.sm_clock_mhz()
    for shape in SHAPES:
        x = torch.randn(shape, device="cuda").bfloat16()
        one = torch.ones(1, device="cuda")
        amax, scale_inv = torch.zeros(1, device="cuda"), torch.empty(1, device="cuda")
        row = torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda")
        col = torch.empty(shape[::-1], dtype=torch.float8_e4m3fn, device="cuda")
        for variant in ("both", "rowwise", "transposed", "both + dbias"):
            both = variant.startswith("both")
            make_row, make_col = both or variant == "rowwise", both or variant == "transposed"

            def call(make_row=make_row, make_col=make_col, dbias=variant == "both + dbias"):
                cast_transpose(
                    x, one, torch.float8_e4m3fn, rowwise=make_row, transposed=make_col, amax=amax,
                    scale_inv=scale_inv, with_dbias=dbias, out_rowwise=row if make_row else None,
                    out_transposed=col if make_col else None,
                )  # fmt: skip

            num_bytes = x.numel() * (2 + make_row + make_col)
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
