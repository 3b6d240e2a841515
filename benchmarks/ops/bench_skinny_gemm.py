"""FP8 products of few rows: fp8_gemm, torch._scaled_mm and what cuBLASLt's options change.

For each shape one line of times in microseconds, cold L2, all contenders taking turns: fp8_gemm and
torch._scaled_mm with fast and with split accumulation; a call of cuBLASLt through ctypes with room
for 32 MiB of partial sums ("base", whose result must agree) and that call with one option changed;
the fastest of base's proposals with its place in the list. A variant whose first proposal is base's
algorithm is shown as "=", one without a proposal as "-". The next line has the configurations of
base, of the variants that differ and of the fastest proposal. "graph": inside a replayed CUDA
graph, warm L2, where a launch costs nothing. "floor": bytes of the operands and the output over 4.3
TB/s.

    python benchmarks/ops/bench_skinny_gemm.py [--names]    # --names: the kernels' names, too
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
from cublaslt_variants import CublasLt, CublasLtError, Options, Product

from apex_te.ops.cast_transpose import cast_transpose
from apex_te.ops.fp8_gemm import fp8_gemm

ROWS = (16, 64, 128, 256)
SHAPES = ((7168, 16384), (4096, 4096), (28672, 4096), (4096, 14336))  # N, K
E4M3 = torch.float8_e4m3fn
BYTES_PER_US = 4.3e6
VARIANTS = {
    "ws 0": Options(workspace=0),
    "ws 1M": Options(workspace=1 << 20),
    "ws 8M": Options(workspace=8 << 20),
    "ws 256M": Options(workspace=256 << 20),
    "no align": Options(alignment=None),
    "align 16": Options(alignment=16),
    "mode": Options(scale_mode=True),
    "row order": Options(row_order=True),
    "torch's": Options(workspace=1 << 20, alignment=None, scale_mode=True),
}


def operand(rows: int, cols: int) -> torch.Tensor:
    x = torch.randn(rows, cols, device="cuda").bfloat16()
    return cast_transpose(x, torch.full((1,), 64.0, device="cuda"), E4M3, columnwise=False).rowwise


def product(library: CublasLt, tensors: tuple, options: Options) -> Product | None:
    """Returns the product with ``options`` after a first run; None where there is no algorithm."""
    try:
        made = Product(library, *tensors, options)
        made.run()
    except (CublasLtError, IndexError):
        return None
    return made


def usable(made: Product) -> list[int]:
    """Returns the places of the proposals that can be launched."""
    places = []
    for index in range(len(made.proposals)):
        try:
            made.run(index)
        except CublasLtError:
            continue
        places.append(index)
    return places


def kernels(call: Callable[[], Any]) -> str:
    """Returns the names of the kernels that a call launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    return " + ".join(event.key[:100] for event in profiled.key_averages())


def check(made: Product, tensors: tuple) -> None:
    """Stops unless ctypes computes what fp8_gemm does, up to the order of sums."""
    a, b, scale_inv, out = tensors
    out.fill_(float("nan"))
    made.run()
    expected = fp8_gemm(a, b, scale_inv, scale_inv)
    error = (out.float() - expected.float()).norm() / expected.float().norm()
    if not error < 5e-3:
        sys.exit(f"bench_skinny_gemm: the products differ by {error:.1e}")


def measure(library: CublasLt, m: int, n: int, k: int, names: bool) -> dict[str, Any]:
    a, b = operand(m, k), operand(n, k)
    one = torch.full((1,), 1 / 64, device="cuda")
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    tensors = (a, b, one, out)
    base = product(library, tensors, Options())
    if base is None:
        sys.exit("bench_skinny_gemm: cuBLASLt has no algorithm")
    check(base, tensors)

    def ours(split: bool) -> Callable[[], Any]:
        return lambda: fp8_gemm(a, b, one, one, out=out, use_split_accumulator=split)

    def theirs(split: bool) -> Callable[[], Any]:
        return lambda: torch._scaled_mm(
            a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=not split, out=out
        )

    calls: dict[str, Callable[[], Any]] = {
        "ours": ours(False), "torch": theirs(False), "ours split": ours(True),
        "torch split": theirs(True), "base": base.run,
    }  # fmt: skip
    shown: dict[str, Any] = {}
    configurations = {"base": base.configuration()}
    for name, options in VARIANTS.items():
        made = product(library, tensors, options)
        if made is None:
            shown[name] = "-"
        elif made.algorithm() == base.algorithm():
            shown[name] = "="
        else:
            calls[name] = made.run
            configurations[name] = made.configuration()
    proposals = {i: (lambda i=i: base.run(i)) for i in usable(base) if i}
    turns = harness.paired_us([*calls.values(), *proposals.values()], repeats=15, warmup=2)
    times = [turn["us"] for turn in turns]
    shown |= dict(zip(calls, times, strict=False))
    of_list = dict(zip(proposals, times[len(calls) :], strict=True)) | {0: shown["base"]}
    best = min(of_list, key=of_list.__getitem__)
    configurations[f"best #{best}"] = base.configuration(best)
    row = {"M": m, "N": n, "K": k, "floor": (m * k + n * k + 2 * m * n) / BYTES_PER_US}
    row |= {key: shown[key] for key in ("ours", "torch", "ours split", "torch split", "base")}
    row |= {"best": of_list[best], "at": best, "of": len(of_list)}
    row |= {key: shown[key] for key in VARIANTS}
    for key, call in (("ours", ours(False)), ("best", lambda: base.run(best))):
        row[f"graph {key}"] = harness.graph_us(call, 20)
    row["graph torch"] = harness.graph_us(theirs(False), 20)
    row["torch over ours"] = shown["torch"] / shown["ours"]
    row["configurations"] = configurations
    if names:
        row["kernels"] = {"ours": kernels(ours(False)), "torch": kernels(theirs(False))}
    return row


def line(row: dict[str, Any]) -> str:
    hidden = ("configurations", "kernels", "M", "N", "K")
    cells = [f"{key} {v:.4g}" if isinstance(v, float) else f"{key} {v}"
             for key, v in row.items() if key not in hidden]  # fmt: skip
    text = f"{row['M']}x{row['N']}x{row['K']}: " + ", ".join(cells)
    told = [f"{key}: {value}" for key, value in row["configurations"].items()]
    told += [f"{key} runs {value}" for key, value in row.get("kernels", {}).items()]
    return "\n    ".join([text, *told])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", action="store_true", help="also print kernels' names")
    names = parser.parse_args().names
    library, rows = CublasLt(), []
    for n, k in SHAPES:
        for m in ROWS:
            rows.append(measure(library, m, n, k, names))
            print(line(rows[-1]), flush=True)
    ratios = [row["torch over ours"] for row in rows]
    print(f"torch over ours: least {min(ratios):.3f}, most {max(ratios):.3f}")
    harness.save("skinny_gemm", rows)


if __name__ == "__main__":
    main()
