"""cast_transpose: bandwidth against a copy of the same bytes in the same run.

Bytes counted: 4 an element for bf16 to both outputs (read 2, write 1 + 1), 3 for rowwise only.
"""

from __future__ import annotations

from collections.abc import Iterator

import harness
import torch

from apex_te.ops.cast_transpose import cast_transpose

E4M3 = torch.float8_e4m3fn
SHAPES = [(16384, 4096), (16384, 14336), (14336, 4096), (4096, 4096), (16384, 3584)]


@harness.case("cast_transpose", SHAPES)
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
