"""Llama-3-8B's layers on several ranks: whole, split or sharded, and the slowest rank's times."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import harness
import torch
import transformer_stacks as stacks
from torch import distributed
from torch.distributed.fsdp import fully_shard

from apex_te import recipe
from apex_te.comm import collectives
from apex_te.distributed.fsdp.fp8_all_gather import enable_fp8_all_gather
from apex_te.module._core import tensor_parallel as _tensor_parallel

HIDDEN, TOKENS, BATCH = stacks.SHAPES["Llama-3-8B"]["hidden"], 4096, 2


@contextmanager
def rank_of_job() -> Iterator[int]:
    """Joins the NCCL group of torchrun's processes while the block runs; yields this rank."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
    yield rank
    distributed.destroy_process_group()


def report(name: str, rows: Callable[[], Iterator[harness.Row]]) -> None:
    """Measures rows on all ranks of torchrun's job, and reports those of the first."""
    with rank_of_job() as rank:
        found = list(rows())
        if rank == 0:
            harness.report(name, found)


def layer(ranks: int = 1, group: Any = None) -> torch.nn.Module:
    split = ranks > 1
    return stacks.layer(
        **stacks.SHAPES["Llama-3-8B"], attn_input_format="sbhd", set_parallel_mode=split,
        sequence_parallel=split, tp_group=group, tp_size=ranks,
    )  # fmt: skip


def sharded(layers: int, gathers: recipe.Recipe | None, mesh: Any = None) -> torch.nn.Module:
    """Makes layers that FSDP2 shards one by one; with a recipe it gathers them as FP8 data."""
    model = torch.nn.Sequential(*(layer() for _ in range(layers)))
    if gathers is not None:
        enable_fp8_all_gather(model, gathers)
    for part in model:
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step(module: torch.nn.Module, tokens: int, fp8: bool) -> Callable[[], None]:
    region = stacks.our_autocast(recipe.DelayedScaling() if fp8 else None)
    return stacks.step(module, region, (tokens, BATCH, HIDDEN))


def without_peer_memory() -> AbstractContextManager[Any]:
    """Every exchange a collective."""
    return mock.patch.object(_tensor_parallel, "peer_memory", lambda *_: None)  # noqa: PT008


def copies_instead(copies: bool = True) -> AbstractContextManager[Any]:
    """Collectives of the modules replaced by copies of the same bytes on the device, or left out.

    Left out, they leave what the allocator's memory holds: values of steps before.
    """

    def gather(x: torch.Tensor, group: Any) -> collectives.Pending:
        out = x.new_empty((x.shape[0] * collectives.world_size(group), *x.shape[1:]))
        for part in out.chunk(collectives.world_size(group)) if copies else ():
            part.copy_(x)
        return collectives.Pending(out)

    def scatter(x: torch.Tensor, group: Any, out: Any = None) -> collectives.Pending:
        part = x.chunk(collectives.world_size(group))[0]
        out = torch.empty_like(part) if out is None else out
        return collectives.Pending(out.copy_(part) if copies else out)

    rows = {"all_gather_rows": gather, "reduce_scatter_rows": scatter}
    return mock.patch.multiple(_tensor_parallel, **rows)


def of_ranks(times: list[float], op: Any = distributed.ReduceOp.MAX) -> float:
    """Median of times that are reduced over the ranks, by default to the slowest rank's."""
    found = torch.tensor(times, device="cuda")
    distributed.all_reduce(found, op=op)
    return statistics.median(found.tolist())


def milliseconds(
    run: Callable[[], Any], repeats: int = 25, warmup: int = 6, op: Any = distributed.ReduceOp.MAX
) -> float:
    """``of_ranks`` of a step's times that begin together, cold L2."""
    for _ in range(warmup):
        run()
    times = []
    for _ in range(repeats):
        distributed.barrier()
        times.append(harness.kernel_us(run, 1, 0)["us"] / 1e3)
    return of_ranks(times, op)
