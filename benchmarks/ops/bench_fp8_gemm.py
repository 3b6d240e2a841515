"""fp8_gemm against torch._scaled_mm on random data, 20 interleaved pairs a case.

Shapes are the layers of performance tables: M tokens, N outputs, K inputs. wgrad accumulates into
float32 and is compared with _scaled_mm (float32 out) followed by add_. "ratio" is the default, the
heuristic's first algorithm; "ratio tuned" is APEX_TE_GEMM_TUNE=1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import harness
import torch

from apex_te.ops import gemm_tuning
from apex_te.ops.cast_transpose import cast_transpose
from apex_te.ops.fp8_gemm import fp8_gemm

SHAPES = [
    (16384, 4096, 4096), (16384, 14336, 4096), (16384, 4096, 14336), (16384, 6144, 4096),
    (4096, 7168, 2048),
]  # fmt: skip
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


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
        sizes: tuple[int, int, int], dtype: torch.dtype, split: bool, out: str,
        calls: list[Callable[[], Any]],
    ) -> harness.Row:  # fmt: skip
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
        if tuned:
            made["ratio tuned"] = peer["us"] / tuned[0]["us"]
        return {**made, "bf16 mm TFLOP/s": flops / bf16["us"] / 1e6}

    for a_type, split in ((E4M3, False), (E4M3, True), (E5M2, False), (E5M2, True)):
        a, b = operand(m, k, a_type), operand(n, k, E4M3)
        out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
        ours = functools.partial(fp8_gemm, a, b, one, one, out=out, use_split_accumulator=split)
        theirs = functools.partial(
            torch._scaled_mm, a, b.t(), one, one, out_dtype=torch.bfloat16,
            use_fast_accum=not split, out=out,
        )  # fmt: skip

        def tuned(ours: Callable[[], Any] = ours) -> None:
            gemm_tuning.is_active = True
            ours()
            gemm_tuning.is_active = False

        yield row((m, n, k), a_type, split, "bfloat16", [ours, theirs, tuned])
    a, b = operand(n, m, E5M2), operand(k, m, E4M3)
    total = torch.zeros(n, k, device="cuda")
    wgrad = functools.partial(
        fp8_gemm, a, b, one, one, out=total, accumulate=True, use_split_accumulator=True
    )
    product = functools.partial(
        torch._scaled_mm, a, b.t(), one, one, out_dtype=torch.float32, use_fast_accum=False
    )
    calls = [wgrad, lambda: total.add_(product())]
    yield row((n, k, m), E5M2, True, "float32 +=", calls)
