"""A Llama-3-8B layer in FP8 (delayed scaling) on several GPUs against the same layer on one.

``torchrun --nproc_per_node 2 benchmarks/layers/bench_tensor_parallel.py``: tensor parallelism with
sequence parallelism, 2 x 4096 tokens, forward + backward, the configuration of
bench_transformer.py. Exposed communication is the step's time minus that of the same step whose
collectives are copies on the device. "collectives ms" is the step without peers' memory: whole
gathers and reductions over NCCL. Steps run in a row, as in training, where the host is ahead of the
GPU; "one step" begins on an idle GPU, whose first kernels wait for the host. Every rank times every
step; the slowest rank counts.

Pieces, one exchange with its product on 2 H200, us (FP8; gathers of 2 x 16.8 MB, sums of 67 MB):

| product | alone | collective, then product | NCCL in 2 pieces | peers' memory |
|---|---|---|---|---|
| QKV, gather before | 140 | 235 | 239 | 153 |
| FC1, gather before | 646 | 812 | 825 | 718 |
| projection, sum behind | 106 | 271 | 277 | 188 |
| FC2, sum behind | 319 | 488 | 502 | 355 |
| projection's gradient, gather before | 105 | 197 | 200 | 116 |
| FC2's gradient, gather before | 357 | 453 | 508 | 395 |

Also tried: NCCL in 4 pieces (projection 339, FC2 608), the product writing to the peer's memory
itself (200, 429), two copies for each piece (165, 389).

One step of the layer, time with collectives over time with pieces of any size, FP8 / bf16: on 2
GPUs 2 x 1024 tokens 0.99 / 0.99, 2 x 2048 0.99 / 1.18; on 4 GPUs 2 x 4096 0.94 / 1.13. Hence the
smallest piece of 16 MiB: smaller ones save less time than their launches take.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import distributed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
from llama_ranks import (
    TOKENS,
    copies_instead,
    layer,
    milliseconds,
    of_slowest,
    rank_of_job,
    step,
    without_peer_memory,
)  # fmt: skip


def in_a_row(run: Callable[[], None], steps: int = 8, repeats: int = 7) -> float:
    """Milliseconds of a step among others, of the slowest rank; median over repeats."""
    for _ in range(4):
        run()
    times = []
    for _ in range(repeats):
        distributed.barrier()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(steps):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / steps)
    return of_slowest(times)


def measured() -> Iterator[harness.Row]:
    """Yields the rows; each rank measures them."""
    ranks = distributed.get_world_size()
    for name, fp8 in (("delayed", True), ("bf16", False)):
        run = step(layer(), TOKENS, fp8)
        alone, alone_idle = in_a_row(run), milliseconds(run)
        run = step(layer(ranks, distributed.group.WORLD), TOKENS // ranks, fp8)
        split, idle = in_a_row(run), milliseconds(run)
        with without_peer_memory():
            whole, whole_idle = in_a_row(run), milliseconds(run)
            with copies_instead():
                local = in_a_row(run)
        yield {
            "layer": "Llama-3-8B",
            "stack": f"apex_te {name}",
            "ranks": ranks,
            "one GPU ms": alone,
            "ms": split,
            "speed-up": alone / split,
            "collectives ms": whole,
            "exposed communication ms": split - local,
            "exposed with collectives ms": whole - local,
            "one step, one GPU ms": alone_idle,
            "one step ms": idle,
            "one step, collectives ms": whole_idle,
        }


def main() -> None:
    with rank_of_job() as rank:
        rows = list(measured())
        if rank == 0:
            harness.report("tensor_parallel", rows)


if __name__ == "__main__":
    main()
