"""fp8_gemm against torch._scaled_mm on random data, 20 interleaved pairs a case.

Shapes are the layers of performance tables: M tokens, N outputs, K inputs. wgrad accumulates into
float32 and is compared with _scaled_mm (float32 out) followed by add_. "ratio" is the default, the
heuristic's first algorithm; "ratio tuned" is APEX_TE_GEMM_TUNE=1.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

from apex_te.ops import gemm_tuning
from apex_te.ops.cast_transpose import cast_transpose
from apex_te.ops.fp8_gemm import fp8_gemm

SHAPES = [
    (16384, 4096, 4096), (16384, 14336, 4096), (16384, 4096, 14336), (16384, 6144, 4096),
    (4096, 7168, 2048),
]  # fmt: skip
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def operand(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(rows, cols, device="cuda").bfloat16()
    return cast_transpose(x, torch.full((1,), 64.0, device="cuda"), dtype, columnwise=False).rowwise


def main() -> None:
    rows = []
    one = torch.full((1,), 1 / 64, device="cuda")
    clock = harness.sm_clock_mhz()
    ratios: list[float] = []
    tuned_ratios: list[float] = []
    for m, n, k in SHAPES:
        flops = 2 * m * n * k
        bf16_a = torch.randn(m, k, device="cuda").bfloat16()
        bf16_b = torch.randn(n, k, device="cuda").bfloat16()
        bf16 = harness.kernel_us(lambda a=bf16_a, b=bf16_b: torch.mm(a, b.t()), repeats=20)
        del bf16_a, bf16_b
        for a_type, split in ((E4M3, False), (E4M3, True), (E5M2, False), (E5M2, True)):
            a, b = operand(m, k, a_type), operand(n, k, E4M3)
            out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")

            def ours(a=a, b=b, out=out, split=split):
                fp8_gemm(a, b, one, one, out=out, use_split_accumulator=split)

            def theirs(a=a, b=b, out=out, split=split):
                torch._scaled_mm(
                    a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=not split, out=out
                )

            def tuned(ours=ours):
                gemm_tuning.is_active = True
                ours()
                gemm_tuning.is_active = False

            mine, peer, best = harness.paired_us([ours, theirs, tuned])
            ratios.append(peer["us"] / mine["us"])
            tuned_ratios.append(peer["us"] / best["us"])
            rows.append(
                {
                    "M x N x K": f"{m}x{n}x{k}",
                    "a": "E4M3" if a_type is E4M3 else "E5M2",
                    "accumulator": "split" if split else "fast",
                    "out": "bfloat16",
                    **mine,
                    "TFLOP/s": flops / mine["us"] / 1e6,
                    "_scaled_mm us": peer["us"],
                    "ratio": ratios[-1],
                    "ratio tuned": tuned_ratios[-1],
                    "bf16 mm TFLOP/s": flops / bf16["us"] / 1e6,
                }
            )
        a, b = operand(n, m, E5M2), operand(k, m, E4M3)
        total = torch.zeros(n, k, device="cuda")

        def wgrad(a=a, b=b, total=total):
            fp8_gemm(a, b, one, one, out=total, accumulate=True, use_split_accumulator=True)

        def two_steps(a=a, b=b, total=total):
            product = torch._scaled_mm(
                a, b.t(), one, one, out_dtype=torch.float32, use_fast_accum=False
            )
            total.add_(product)

        mine, peer = harness.paired_us([wgrad, two_steps])
        rows.append(
            {
                "M x N x K": f"{n}x{k}x{m}",
                "a": "E5M2",
                "accumulator": "split",
                "out": "float32 +=",
                **mine,
                "TFLOP/s": flops / mine["us"] / 1e6,
                "_scaled_mm us": peer["us"],
                "ratio": peer["us"] / mine["us"],
                "bf16 mm TFLOP/s": flops / bf16["us"] / 1e6,
            }
        )

    def mean(values: list[float]) -> float:
        return round(math.exp(sum(map(math.log, values)) / len(values)), 4)

    harness.report(
        "fp8_gemm",
        rows,
        geometric_mean=mean(ratios),
        least=round(min(ratios), 4),
        geometric_mean_tuned=mean(tuned_ratios),
        least_tuned=round(min(tuned_ratios), 4),
        sm_clock_mhz=f"{clock} to {harness.sm_clock_mhz()}",
    )


if __name__ == "__main__":
    main()
