"""Block-scaled products against torch.nn.functional.scaled_mm on random data, in turns.

Shapes are the layers of performance tables: M tokens, N outputs, K inputs. fprop and dgrad are
1x128 . 128x128 to bfloat16; wgrad is 1x128 . 1x128 to float32, and "wgrad +=" accumulates, compared
with scaled_mm followed by add_. The geometric mean is over the first three.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import harness
import torch
from torch.nn.functional import ScalingType, scaled_mm

from apex_te.ops.block_quantize import block_quantize
from apex_te.ops.fp8_gemm import block_scaled_gemm

SHAPES = [
    (16384, 4096, 4096), (16384, 14336, 4096), (16384, 4096, 14336), (16384, 6144, 4096),
    (4096, 7168, 2048),
]  # fmt: skip
_ROUNDS = 50  # the clock falls under load: a median of 20 pairs was off by 4%
ROW, SQUARE = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128


def operand(rows: int, cols: int, block_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = harness.normal(rows, cols)
    out = block_quantize(x, torch.float8_e4m3fn, block_rows=block_rows, columnwise=False)
    return out[:2]


def row_of(name: str, m: int, n: int, k: int) -> dict[str, Any]:
    b_block_rows = 1 if name.startswith("wgrad") else 128
    dtype = torch.float32 if name.startswith("wgrad") else torch.bfloat16
    accumulate = name.endswith("+=")
    (a, sa), (b, sb) = operand(m, k, 1), operand(n, k, b_block_rows)
    out = torch.zeros(m, n, dtype=dtype, device="cuda")

    def ours() -> None:
        block_scaled_gemm(a, b, sa, sb, b_block_rows=b_block_rows, out=out, accumulate=accumulate)

    def theirs() -> None:
        product = scaled_mm(
            a, b.t(), sa.t(), ROW, sb.t(), ROW if b_block_rows == 1 else SQUARE, output_dtype=dtype
        )
        if accumulate:
            out.add_(product)

    mine, peer = harness.paired_us([ours, theirs], repeats=_ROUNDS)
    return {
        "product": name,
        "M x N x K": f"{m}x{n}x{k}",
        **mine,
        "TFLOP/s": 2 * m * n * k / mine["us"] / 1e6,
        "scaled_mm us": peer["us"],
        "ratio": peer["us"] / mine["us"],
    }


def sums(rows: list[harness.Row]) -> dict[str, float]:
    return harness.mean_and_least(
        [row["ratio"] for row in rows if not row["product"].endswith("+=")]
    )


@harness.case("fp8_gemm_block", sums=sums)
def rows() -> Iterator[harness.Row]:
    for m, n, k in SHAPES:
        yield row_of("fprop", m, n, k)
        yield row_of("dgrad", m, k, n)
        yield row_of("wgrad", n, k, m)
        yield row_of("wgrad +=", n, k, m)
