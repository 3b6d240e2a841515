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

import os
import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

import apex_te
from apex_te import recipe
from apex_te.comm import collectives
from apex_te.module._core import tensor_parallel as _tensor_parallel

HIDDEN, FFN, HEADS, GROUPS, TOKENS, BATCH = 4096, 14336, 32, 8, 4096, 2


def layer(ranks: int, group: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    return apex_te.TransformerLayer(
        HIDDEN,
        FFN,
        HEADS,
        num_gqa_groups=GROUPS,
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fuse_qkv_params=True,
        params_dtype=torch.bfloat16,
        device="cuda",
        set_parallel_mode=ranks > 1,
        tp_group=group,
        tp_size=ranks,
        sequence_parallel=ranks > 1,
    )


def step(module: torch.nn.Module, tokens: int, fp8: bool) -> Callable[[], None]:
    x = torch.randn(tokens, BATCH, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    scaling = recipe.DelayedScaling()

    def run() -> None:
        x.grad = None
        for parameter in module.parameters():
            parameter.grad = None
        with apex_te.fp8_autocast(fp8, scaling):
            y = module(x)
        y.backward(dy)

    return run


def without_peer_memory() -> AbstractContextManager[Any]:
    """Every exchange a collective."""

    def no_memory(*_: Any) -> None:
        return None

    return mock.patch.object(_tensor_parallel, "peer_memory", no_memory)


def copies_instead() -> AbstractContextManager[Any]:
    """Collectives of the modules replaced by copies of the same bytes on the device."""

    def gather(x: torch.Tensor, group: Any) -> collectives.Pending:
        out = x.new_empty((x.shape[0] * collectives.world_size(group), *x.shape[1:]))
        for part in out.chunk(collectives.world_size(group)):
            part.copy_(x)
        return collectives.Pending(out)

    def scatter(x: torch.Tensor, group: Any, out: Any = None) -> collectives.Pending:
        part = x.chunk(collectives.world_size(group))[0]
        return collectives.Pending(part.clone() if out is None else out.copy_(part))

    return mock.patch.multiple(
        _tensor_parallel, all_gather_rows=gather, reduce_scatter_rows=scatter
    )


def of_slowest(times: list[float]) -> float:
    """Median of the slowest rank's times."""
    slowest = torch.tensor(times, device="cuda")
    distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def milliseconds(run: Callable[[], None], repeats: int = 25) -> float:
    """Median over steps of the slowest rank's time, cold L2."""
    for _ in range(6):
        run()
    times = []
    for _ in range(repeats):
        distributed.barrier()
        times.append(harness.kernel_us(run, 1, 0)["us"] / 1e3)
    return of_slowest(times)


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


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
    ranks = distributed.get_world_size()
    group = distributed.group.WORLD
    rows: list[dict[str, Any]] = []
    for name, fp8 in (("delayed", True), ("bf16", False)):
        run = step(layer(1, None), TOKENS, fp8)
        alone, alone_idle = in_a_row(run), milliseconds(run)
        run = step(layer(ranks, group), TOKENS // ranks, fp8)
        split, idle = in_a_row(run), milliseconds(run)
        with without_peer_memory():
            whole, whole_idle = in_a_row(run), milliseconds(run)
            with copies_instead():
                local = in_a_row(run)
        rows.append(
            {
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
        )
    if rank == 0:
        harness.report("tensor_parallel", rows)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
