"""Every op on the CPU: its time beside the plain PyTorch formula's, and casts against a copy.

    python benchmarks/cpu.py            # all functions, two to three minutes; results/cpu.json
    python benchmarks/cpu.py rope mx    # those with one of these words in their names; prints only

``over formula`` is the formula's time over ours. The formula is a fused torch op where there is
one, else a few lines of PyTorch in the same dtype; of a backward, autograd's pass through it. Casts
and quantizers also give GB/s over the fewest bytes that must move, and the fraction of what a copy_
of 512 MB reads and writes in that time. Each time is the best of many calls that take turns.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import harness
import torch
from cpu_casts import CASTS, Row
from cpu_ops import OPS

COPY_BYTES = 512 << 20
SECONDS = 0.5  # for one row


def best_us(calls: list[Callable[[], Any]], seconds: float = SECONDS) -> list[float]:
    """The shortest time of each call; they take turns for so long, twice at least."""
    for call in calls:
        call()
    best = [float("inf")] * len(calls)
    turns, end = 0, time.perf_counter() + seconds
    while turns < 2 or time.perf_counter() < end:
        turns += 1
        for k, call in enumerate(calls):
            begin = time.perf_counter()
            call()
            best[k] = min(best[k], (time.perf_counter() - begin) * 1e6)
    return best


def copy_gigabytes_per_second() -> float:
    source = torch.empty(COPY_BYTES, dtype=torch.uint8).random_()
    target = torch.empty_like(source)
    (us,) = best_us([lambda: target.copy_(source)], seconds=2.0)
    return 2 * COPY_BYTES / us / 1e3


def measure(row: Row, dtype: torch.dtype, copy: float) -> dict[str, Any]:
    calls = [row.call] if row.formula is None else [row.call, row.formula]
    us, *formula = best_us(calls)
    result: dict[str, Any] = {"function": row.function, "dtype": str(dtype).removeprefix("torch.")}
    result["us"] = us
    if formula:
        result |= {"formula us": formula[0], "over formula": formula[0] / us}
    if row.num_bytes:
        rate = row.num_bytes / us / 1e3
        result |= {"GB/s": rate, "of copy": rate / copy}
    return result


def main() -> None:
    wanted = sys.argv[1:]
    before = os.getloadavg()[0]
    copy = copy_gigabytes_per_second()
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for family in (*CASTS, *OPS):
            for row in family(dtype):
                if not wanted or any(name in row.function for name in wanted):
                    rows.append(measure(row, dtype, copy))
            gc.collect()
    if wanted:
        os.environ["OUT"] = tempfile.mkdtemp()
    harness.report(
        "cpu", rows, threads=torch.get_num_threads(), copy_gb_s=round(copy, 1),
        load=f"{before:.2f} to {os.getloadavg()[0]:.2f}",
    )  # fmt: skip


if __name__ == "__main__":
    main()
