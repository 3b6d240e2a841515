"""FP8 products on random data, in turns with torch's.

Shapes are the layers of performance tables: M tokens, N outputs, K inputs.

``fp8_gemm``: against torch._scaled_mm, 20 pairs a case; wgrad accumulates into float32 and is
compared with _scaled_mm (float32 out) followed by add_. "ratio" is the default, the heuristic's
first algorithm; "ratio tuned" is APEX_TE_GEMM_TUNE=1.

``fp8_gemm_block``: against torch.nn.functional.scaled_mm. fprop and dgrad are 1x128 . 128x128 to
bfloat16; wgrad is 1x128 . 1x128 to float32, and "wgrad +=" accumulates, compared with scaled_mm
followed by add_. The geometric mean is over the first three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import harness
import torch
from torch.nn.functional import ScalingType, scaled_mm

from apex_te.ops import gemm_tuning
from apex_te.ops.block_quantize import block_quantize
from apex_te.ops.cast_transpose import cast_transpose
from apex_te.ops.fp8_gemm import block_scaled_gemm, fp8_gemm

SHAPES = [
    (16384, 4096, 4096), (16384, 14336, 4096), (16384, 4096, 14336), (16384, 6144, 4096),
    (4096, 7168, 2048),
]  # fmt: skip
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROW, SQUARE = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
_ROUNDS = 50  # the clock falls under load: a median of 20 pairs was off by 4%
Call = Callable[[], Any]


def operand(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    x, scale = harness.normal(rows, cols), torch.full((1,), 64.0, device="cuda")
    return cast_transpose(x, scale, dtype, columnwise=False).rowwise


def sums(rows: list[harness.Row]) -> dict[str, float]:
    tuned = [row for row in rows if "ratio tuned" in row]
    found = harness.mean_and_least([row["ratio"] for row in tuned])
    return found | harness.mean_and_least([row["ratio tuned"] for row in tuned], "_tuned")


@harness.case("fp8_gemm", *zip(*SHAPES, strict=True), sums=sums)
def rows_of(m: int, n: int, k: int) -> Iterator[harness.Row]:
    one = torch.full((1,), 1 / 64, device="cuda")
    flops = 2 * m * n * k
    a, b = harness.normal(m, k), harness.normal(n, k)
    bf16 = harness.kernel_us(lambda: torch.mm(a, b.t()), repeats=20)

    def row(
        sizes: tuple[int, int, int], dtype: torch.dtype, split: bool, out: str, calls: list[Call]
    ) -> harness.Row:
        mine, peer, *tuned = harness.paired_us(calls)
        made = {
            "M x N x K": harness.text_of(sizes),
            "a": "E4M3" if dtype is E4M3 else "E5M2",
            "accumulator": "split" if split else "fast",
            "out": out,
            **mine,
            "TFLOP/s": flops / mine["us"] / 1e6,
            "_scaled_mm us": peer["us"],
            "ratio": peer["us"] / mine["us"],
        }
        made |= {"ratio tuned": peer["us"] / tuned[0]["us"]} if tuned else {}
        return {**made, "bf16 mm TFLOP/s": flops / bf16["us"] / 1e6}

    for a_type, split in ((E4M3, False), (E4M3, True), (E5M2, False), (E5M2, True)):
        a, b = operand(m, k, a_type), operand(n, k, E4M3)
        out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
        ours = partial(fp8_gemm, a, b, one, one, out=out, use_split_accumulator=split)
        options = {"out_dtype": torch.bfloat16, "use_fast_accum": not split, "out": out}
        theirs = partial(torch._scaled_mm, a, b.t(), one, one, **options)

        def tuned(ours: Call = ours) -> None:
            gemm_tuning.is_active = True
            ours()
            gemm_tuning.is_active = False

        yield row((m, n, k), a_type, split, "bfloat16", [ours, theirs, tuned])
    a, b, total = operand(n, m, E5M2), operand(k, m, E4M3), torch.zeros(n, k, device="cuda")
    options = {"out": total, "accumulate": True, "use_split_accumulator": True}
    wgrad = partial(fp8_gemm, a, b, one, one, **options)
    options = {"out_dtype": torch.float32, "use_fast_accum": False}
    product = partial(torch._scaled_mm, a, b.t(), one, one, **options)
    calls = [wgrad, lambda: total.add_(product())]
    yield row((n, k, m), E5M2, True, "float32 +=", calls)


def block_row(name: str, m: int, n: int, k: int) -> dict[str, Any]:
    is_wgrad, accumulate = name.startswith("wgrad"), name.endswith("+=")
    rows, dtype = (1, torch.float32) if is_wgrad else (128, torch.bfloat16)
    (a, sa), (b, sb) = (
        block_quantize(harness.normal(size, k), E4M3, block_rows=each, columnwise=False)[:2]
        for size, each in ((m, 1), (n, rows))
    )
    out = torch.zeros(m, n, dtype=dtype, device="cuda")
    scaling = (sa.t(), ROW, sb.t(), ROW if is_wgrad else SQUARE)

    def theirs() -> None:
        product = scaled_mm(a, b.t(), *scaling, output_dtype=dtype)
        if accumulate:
            out.add_(product)

    options = {"b_block_rows": rows, "out": out, "accumulate": accumulate}
    ours = partial(block_scaled_gemm, a, b, sa, sb, **options)
    mine, peer = harness.paired_us([ours, theirs], repeats=_ROUNDS)
    return {
        "product": name,
        "M x N x K": f"{m}x{n}x{k}",
        **mine,
        "TFLOP/s": 2 * m * n * k / mine["us"] / 1e6,
        "scaled_mm us": peer["us"],
        "ratio": peer["us"] / mine["us"],
    }


def block_sums(rows: list[harness.Row]) -> dict[str, float]:
    compared = [row["ratio"] for row in rows if not row["product"].endswith("+=")]
    return harness.mean_and_least(compared)


@harness.case("fp8_gemm_block", *zip(*SHAPES, strict=True), sums=block_sums)
def block_rows(m: int, n: int, k: int) -> Iterator[harness.Row]:
    yield block_row("fprop", m, n, k)
    yield block_row("dgrad", m, k, n)
    yield block_row("wgrad", n, k, m)
    yield block_row("wgrad +=", n, k, m)
