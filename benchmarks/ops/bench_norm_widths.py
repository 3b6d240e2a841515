"""Norms to FP8 in both layouts at every width that is a multiple of 128, and at odd row counts.

Each width has the same number of elements, so that times can be compared across widths: a plan of
fwd_ring_cuda.h that fits some widths badly shows as a step. Times in us, bfloat16, cold L2.

On an H100 every plan that fits was timed at all widths from 1152 to 16384: 32 or 64 rows a tile, 1
to 8 blocks and 1 to 16 warps a row, 1 or 2 rounds. ``norm_ring_time`` picks a plan within 3% of the
fastest in the mean, 20% at worst. What did not help: the fewest blocks and warps that fit in shared
memory (1.30 times the fastest for layer_norm, 1.13 for rms_norm, 4.4 at worst); the fewest that
keep 40 KB in flight with tiles of 64 rows (1.05, 1.5 at worst where tiles are few).
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import norm_rows

from apex_te.ops import layer_norm, rms_norm

ELEMENTS = 64 << 20
WIDTHS = range(1024, 16384 + 1, 128)
ROWS_OF_7168 = (2048, 4096, 8192, 8208, 32640, 32768, 32784, 32800)


def times(rows: int, cols: int) -> dict[str, Any]:
    """Times of both norms, without and with a residual, and of a copy of the bytes of the first."""
    row: dict[str, Any] = {"rows": rows, "cols": cols}
    for op in (layer_norm, rms_norm):
        case = norm_rows.Case(op, (rows, cols))
        for name, residual in ((case.name, None), (f"{case.name} residual", case.residual)):
            quantize = functools.partial(case.quantize, residual=residual)
            row[name] = round(harness.kernel_us(quantize, repeats=9, warmup=2)["us"], 1)
    row["copy"] = round(harness.copy_us(4 * rows * cols)["us"], 1)
    return row


if __name__ == "__main__":
    shapes = [(ELEMENTS // cols // 128 * 128, cols) for cols in WIDTHS]
    shapes += [(rows, 7168) for rows in ROWS_OF_7168]
    harness.run("norm_widths", (times(*shape) for shape in shapes))
