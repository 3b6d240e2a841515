"""A Llama-3-8B layer in FP8 (delayed scaling) on several GPUs against the same layer on one.

``torchrun --nproc_per_node 2 benchmarks/layers/bench_tensor_parallel.py``: tensor parallelism with
sequence parallelism, 2 x 4096 tokens, forward + backward, the configuration of
bench_transformer.py. Exposed communication is the step's time minus that of the same step whose
collectives are copies on the device. "collectives ms" is the step without peers' memory: whole
gathers and reductions over NCCL. Steps run in a row, as in training, where the host is ahead of the
GPU; "one step" begins on an idle GPU, whose first kernels wait for the host. Every rank times every
step; the slowest rank counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import _path  # noqa: F401
import harness
import llama_ranks as llama
import torch
from torch import distributed


def in_a_row(run: Callable[[], None], steps: int = 8, repeats: int = 7) -> float:
    """Milliseconds of a step among others, of the slowest rank; median over repeats."""
    for _ in range(4):
        run()
    times = []
    for _ in range(repeats):
        distributed.barrier()
        torch.cuda.synchronize()
        times.append(harness.elapsed_us(lambda: [run() for _ in range(steps)]) / steps / 1e3)
    return llama.of_ranks(times)


def measured() -> Iterator[harness.Row]:
    ranks = distributed.get_world_size()
    for name, fp8 in (("delayed", True), ("bf16", False)):
        run = llama.step(llama.layer(), llama.TOKENS, fp8)
        alone, alone_idle = in_a_row(run), llama.milliseconds(run)
        run = llama.step(llama.layer(ranks, distributed.group.WORLD), llama.TOKENS // ranks, fp8)
        split, idle = in_a_row(run), llama.milliseconds(run)
        with llama.without_peer_memory():
            whole, whole_idle = in_a_row(run), llama.milliseconds(run)
            with llama.copies_instead():
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


if __name__ == "__main__":
    llama.report("tensor_parallel", measured)
