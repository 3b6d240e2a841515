"""Benchmarks with a rank on each GPU: starts the ranks, and times calls that all take part in."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

sys.path.insert(0, str(Path(__file__).resolve().parent))
import harness

Measured = Callable[[Any, torch.device], list[harness.Row]]


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    distributed.barrier()


def milliseconds(
    calls: list[Callable[[], Any]], rounds: int, steps: int, device: torch.device
) -> list[float]:
    """Returns the median time of each call, ``steps`` in a row, on the slowest rank."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(rounds + 1):
        for call, found in zip(calls, times, strict=True):
            finish(device)
            begin = time.perf_counter()
            for _ in range(steps):
                call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if turn:  # the first is for warming up
                found.append((time.perf_counter() - begin) / steps * 1e3)
    slowest = torch.tensor(times, device=device)
    distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
    return [statistics.median(found) for found in slowest.tolist()]


def run(name: str, doc: str | None, measured: Measured, sizes: Any, tiny_sizes: Any) -> None:
    """Runs ``measured(sizes, device)`` on 2 or 4 GPUs, or on two ranks of the CPU with ``--tiny``.

    ``measured`` is a function of a module; the first rank reports its rows as ``name``.
    """
    parser = harness.parser(doc)
    parser.add_argument("--tiny", action="store_true", help="two ranks on the CPU, small sizes")
    tiny = parser.parse_args().tiny
    gpus = torch.cuda.device_count()
    if not tiny and gpus < 2:
        print(f"{name}: skipped, needs 2 GPUs, got {gpus}")
        return
    ranks = 2 if tiny or gpus < 4 else 4
    with tempfile.TemporaryDirectory() as folder:
        if tiny:  # its times are not results
            os.environ["OUT"] = folder
        given = ranks, tiny, f"{folder}/store", name, measured, tiny_sizes if tiny else sizes
        multiprocessing.spawn(_work, given, nprocs=ranks)


def _work(
    rank: int, ranks: int, tiny: bool, store: str, name: str, measured: Measured, sizes: Any
) -> None:
    device = torch.device("cpu") if tiny else torch.device("cuda", rank)
    if tiny:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "gloo" if tiny else "nccl", init_method=f"file://{store}", rank=rank, world_size=ranks
    )
    rows = [{"ranks": ranks, **row} for row in measured(sizes, device)]
    if rank == 0:
        harness.report(name, rows)
    distributed.barrier()
    distributed.destroy_process_group()
