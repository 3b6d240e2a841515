"""dense_gemm against cuBLASLt's best algorithm, for the products of two Transformer layers.

Llama-3-8B's and GPT's layer (bench_transformer.py), 8192 tokens: fprop with fast sums, dgrad and
wgrad with split ones. Random normal data. After 2 s of load contenders take turns under load, since
power decides: short turns of all tiles and algorithms first, then turns of 0.3 s of the two best
tiles and the best algorithm. pJ/FLOP is the board's energy over the long turns.

One NVIDIA H200 at its power limit, torch 2.11. 2026-11-22: fast sums reach 0.953 of cuBLASLt's best
(geometric mean, least 0.911), split sums 0.985 (0.936 to 1.017), so modules multiply by cuBLASLt.
What did not help: 128x192 with 5 stages instead of 4 (0.93 of it), 128x160, warpgroups that do not
promote at different times, sums added up every 128 products (0.82; every 256: 0.98).

2026-11-23, epilogues beside the next tile's products, us under load, cuBLASLt in parentheses: FC1
1,478 (1,502), FC2 749 (761), QKV 327 (317), GPT's FC1 868 (832), FC2's dgrad with split sums 807
(828). dense_gemm_swiglu for FC1 1,535 where cuBLASLt and the op take 1,626 for the rowwise copy and
1,640 for both; its backward for FC2 986 (1,140), with the activation's columnwise copy 1,101
(1,287). Half of the time that the ops cost is left: 57 us for FC1, 158 for FC2's dgrad. The whole
board draws 700 W in either, so that bytes and instructions count even where they overlap.

    python benchmarks/ops/bench_dense_gemm.py [--budget SECONDS] [--turn S] [--screen S] [--record]
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
from power import Nvml

from apex_te import runtime
from apex_te.ops import dense_gemm, fp8_gemm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOKENS = 8192
LAYERS = {
    "Llama": {
        "QKV": (6144, 4096), "proj": (4096, 4096), "FC1": (28672, 4096), "FC2": (4096, 14336),
    },
    "GPT": {"QKV": (12288, 4096), "FC1": (16384, 4096), "FC2": (4096, 16384)},
}  # fmt: skip
# (promotion, columns, strip, cache) as csrc/dense_gemm has them.
FAST = {
    "256": (0, 256, 0, 4), "256/s16": (0, 256, 16, 4), "256/c0": (0, 256, 0, 0),
    "192": (0, 192, 0, 4), "128": (0, 128, 0, 4),
}  # fmt: skip
SPLIT = {
    "192": (512, 192, 0, 4), "192/s21": (512, 192, 21, 4), "192/c0": (512, 192, 0, 0),
    "128": (512, 128, 0, 4), "192/p256": (256, 192, 0, 4), "192/p128": (128, 192, 0, 4),
}  # fmt: skip


@functools.cache
def nvml() -> Nvml | None:
    try:
        return Nvml()
    except OSError:
        return None


def board_joules() -> float:
    """The board's energy counter; 0 where NVML cannot be read."""
    counters = nvml()
    return (counters and counters.sample().joules) or 0.0


def sustained(call: Callable[[], Any], seconds: float, us: float) -> tuple[float, float]:
    """Microseconds and joules of a call, calls one after the other for some time."""
    count = max(3, int(seconds * 1e6 / us))
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    before = board_joules()
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / count, (board_joules() - before) / count


class Product:
    """One product and its contenders."""

    def __init__(self, m: int, n: int, k: int, *, split: bool, wide: bool) -> None:
        a_type = E5M2 if split else E4M3
        self.flops = 2 * m * n * k
        one = torch.full((1,), 1 / 64, device="cuda")
        self.operands = (codes(m, k, a_type), codes(n, k, E4M3), one, one)
        dtype = torch.float32 if wide else torch.bfloat16
        self.out = torch.zeros((m, n), dtype=dtype, device="cuda")
        self.split, self.wide = split, wide
        self.ours = {
            name: self._our_call(choice) for name, choice in (SPLIT if split else FAST).items()
        }
        self.ours["auto"] = self._our_call((512 if split else 0, 0, 0, 0))
        self.theirs = {f"#{i}": call for i in range(16) if (call := self._their_call(i))}

    def _our_call(self, choice: tuple[int, int, int, int]) -> Callable[[], None]:
        promotion, *tiles = choice

        def call() -> None:
            dense_gemm._lib.dense_gemm(
                *self.operands, self.out, None, None, self.wide, promotion, *tiles
            )

        return call

    def _their_call(self, index: int) -> Callable[[], None] | None:
        scratch = runtime.workspace(self.out.device, fp8_gemm.WORKSPACE_BYTES)

        def call() -> None:
            fp8_gemm._lib.fp8_gemm(
                *self.operands, self.out, None, None, scratch, self.wide, self.split, index
            )

        try:
            call()
        except NotImplementedError:
            return None
        return call


def codes(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16) * 64).to(dtype)


def screened(calls: dict[str, Callable[[], None]], flops: int, seconds: float) -> dict[str, float]:
    """TFLOP/s of each contender, from two short turns."""
    guess = flops / 1.2e9
    total = dict.fromkeys(calls, 0.0)
    for name in (*calls, *reversed(calls)):
        total[name] += sustained(calls[name], seconds, guess)[0] / 2
    return {name: flops / us / 1e6 for name, us in total.items()}


def compared(product: Product, options: argparse.Namespace) -> dict[str, Any]:
    """A row: the best of both sides and how they compare in long turns."""
    flops = product.flops
    ours = screened(product.ours, flops, options.screen)
    theirs = screened(product.theirs, flops, options.screen)
    best = sorted(ours, key=ours.__getitem__)[-2:]
    peer = max(theirs, key=theirs.__getitem__)
    calls = {name: product.ours[name] for name in best} | {peer: product.theirs[peer]}
    us, joules = dict.fromkeys(calls, 0.0), dict.fromkeys(calls, 0.0)
    for name in (*calls, *reversed(calls)):
        speed = theirs[peer] if name == peer else ours[name]
        time_us, energy = sustained(calls[name], options.turn, flops / speed / 1e6)
        us[name] += time_us / 2
        joules[name] += energy / 2
    winner = min(best, key=us.__getitem__)
    listed = " ".join(f"{name}:{speed:.0f}" for name, speed in ours.items())
    print(
        f"    {listed} | cublas {' '.join(f'{k}:{v:.0f}' for k, v in theirs.items())}", flush=True
    )
    return {
        "tile": winner,
        "TFLOP/s": flops / us[winner] / 1e6,
        "cublas": peer,
        "cublas TFLOP/s": flops / us[peer] / 1e6,
        "ratio": us[peer] / us[winner],
        "pJ/FLOP": joules[winner] / flops * 1e12,
        "cublas pJ/FLOP": joules[peer] / flops * 1e12,
    }


def products() -> list[tuple[str, tuple[int, int, int], bool, bool]]:
    """Names, (M, N, K), whether sums are split, whether the result is added to float32."""
    found = []
    for layer, parts in LAYERS.items():
        for part, (outputs, inputs) in parts.items():
            name = f"{layer} {part}"
            found += [
                (f"{name} fprop", (TOKENS, outputs, inputs), False, False),
                (f"{name} dgrad", (TOKENS, inputs, outputs), True, False),
                (f"{name} wgrad", (outputs, inputs, TOKENS), True, False),
            ]
    for part, (outputs, inputs) in LAYERS["Llama"].items():
        found.append((f"Llama {part} wgrad +=", (outputs, inputs, TOKENS), True, True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="dense_gemm against cuBLASLt under load")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds in all")
    parser.add_argument("--turn", type=float, default=0.3)
    parser.add_argument("--screen", type=float, default=0.06)
    parser.add_argument("--warm-up", type=float, default=2.0)
    parser.add_argument("--only", default="", help="part of a product's name")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    begin = time.monotonic()
    clock = harness.sm_clock_mhz()
    rows: list[dict[str, Any]] = []
    chosen = [p for p in products() if options.only in p[0]]
    for name, (m, n, k), split, wide in chosen:
        if time.monotonic() - begin > options.budget:
            print(f"no time left for {name} and those after it", flush=True)
            break
        product = Product(m, n, k, split=split, wide=wide)
        if not rows:
            sustained(next(iter(product.theirs.values())), options.warm_up, product.flops / 1.2e9)
        row = {"product": name, "M x N x K": f"{m}x{n}x{k}", **compared(product, options)}
        rows.append({**row, "sums": "split" if split else "fast"})
        print(
            f"{name:22}{m}x{n}x{k} ours {row['tile']} {row['TFLOP/s']:.0f} "
            f"cublas {row['cublas']} {row['cublas TFLOP/s']:.0f} ratio {row['ratio']:.3f} "
            f"pJ/FLOP {row['pJ/FLOP']:.3f} {row['cublas pJ/FLOP']:.3f}",
            flush=True,
        )
        del product
    for sums in ("fast", "split"):
        ratios = [row["ratio"] for row in rows if row["sums"] == sums]
        mean = statistics.geometric_mean(ratios) if ratios else 0.0
        print(f"{sums}: geometric mean {mean:.3f}, least {min(ratios, default=0):.3f}")
    print(f"clock {clock} to {harness.sm_clock_mhz()} MHz, {time.monotonic() - begin:.0f} s")
    if options.record:
        harness.report("dense_gemm", rows)


if __name__ == "__main__":
    main()
