"""NCCL's collectives, and what of them a Llama-3-8B layer waits for, on 2 and 4 GPUs.

``torchrun --nproc_per_node 4 benchmarks/layers/bench_scaling.py``: all_gather, reduce_scatter,
all_reduce and all_to_all over 64 KB to 256 MB; the layer split by tensor and sequence parallelism,
and LAYERS of them sharded by FSDP2, forward + backward of 2 x 4096 tokens (FSDP2: on each GPU).
With 4 GPUs groups of 2 are measured, too, both at a time. Exposed communication is the step's time
minus that of the same step whose collectives are copies on the device; what a step waits for is its
time minus that of the step without them. Tensor parallelism runs collectives here, as it does
between hosts, not exchanges through peers' memory (bench_tensor_parallel.py).
benchmarks/scaling_model.py reads the results; what it predicts of the layers is printed beside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import _path  # noqa: F401
import harness
import llama_ranks as llama
import scaling_model
import torch
from torch import distributed

from apex_te import recipe
from apex_te.comm import collectives

LAYERS = 4
SIZES = [64 << 10 << 2 * i for i in range(7)]  # bytes of the largest buffer: 64 KB to 256 MB
STACKS = (("bf16", False), ("delayed", True))


def collective_times(group: Any, ranks: int) -> list[dict[str, Any]]:
    """Times of each collective by the size of its largest buffer, bf16."""
    gather = getattr(distributed, collectives.ALL_GATHER)
    scatter = getattr(distributed, collectives.REDUCE_SCATTER)
    rows = []
    for size in SIZES:
        whole = torch.randn(size // 2, device="cuda").bfloat16()
        part = torch.empty(size // 2 // ranks, device="cuda", dtype=torch.bfloat16)
        other = torch.empty_like(whole)
        calls: dict[str, Callable[[], Any]] = {
            "all_gather": lambda w=whole, p=part: gather(w, p, group=group),
            "reduce_scatter": lambda w=whole, p=part: scatter(p, w, group=group),
            "all_reduce": lambda o=other: distributed.all_reduce(o, group=group),
            "all_to_all": lambda w=whole, o=other: distributed.all_to_all_single(o, w, group=group),
        }
        other.zero_()
        for name, call in calls.items():
            row = {"collective": name, "ranks": ranks, "bytes": size}
            # of the last rank to come, which waits for nobody
            ms = llama.milliseconds(call, 15, 3, distributed.ReduceOp.MIN)
            rows.append({**row, "us": ms * 1e3})
    return rows


@contextmanager
def stand_ins(copies: bool) -> Iterator[None]:
    """Replaces collectives of FSDP2, too, as ``llama_ranks.copies_instead`` does."""

    def gather(output_tensor: Any, input_tensor: Any, **_: Any) -> None:
        if copies:
            for part in output_tensor.view(-1, input_tensor.numel()):
                part.copy_(input_tensor.view(-1))

    def scatter(output: Any, input: Any, **_: Any) -> None:
        if copies:
            output.view(-1).copy_(input.view(-1)[: output.numel()])

    gathers = dict.fromkeys(("all_gather_into_tensor", "all_gather_single"), gather)
    scatters = dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_single"), scatter)
    # What FSDP2 calls has another name in torch 2.13.
    calls = {
        name: call for name, call in (gathers | scatters).items() if hasattr(distributed, name)
    }
    with llama.copies_instead(copies), mock.patch.multiple(distributed, **calls):
        yield


def layers(mesh: Any, ranks: int) -> list[dict[str, Any]]:
    rows = []
    for stack, fp8 in STACKS:
        for split in ("tp", "fsdp"):
            if split == "tp":
                run = llama.step(llama.layer(ranks, mesh.get_group()), llama.TOKENS // ranks, fp8)
            else:
                gathers = recipe.DelayedScaling() if fp8 else None
                run = llama.step(llama.sharded(LAYERS, gathers, mesh), llama.TOKENS, fp8)
            with llama.without_peer_memory():
                whole = llama.milliseconds(run)
                with stand_ins(copies=True):
                    local = llama.milliseconds(run)
                with stand_ins(copies=False):
                    alone = llama.milliseconds(run)
            rows.append({
                "layer": "Llama-3-8B", "split": split, "ranks": ranks, "stack": stack,
                "layers": 1 if split == "tp" else LAYERS,
                "tokens": llama.TOKENS, "batch": llama.BATCH,
                "ms": whole, "exposed ms": whole - local, "waited ms": whole - alone,
            })  # fmt: skip
            del run
            torch.cuda.empty_cache()
    return rows


def main() -> None:
    with llama.rank_of_job() as rank:
        world = distributed.get_world_size()
        rows: list[dict[str, Any]] = []
        for stack, fp8 in STACKS:
            ms = llama.milliseconds(llama.step(llama.layer(), llama.TOKENS, fp8))
            rows.append({"alone": stack, "tokens": llama.TOKENS, "batch": llama.BATCH, "ms": ms})
        for ranks in (2, 4):
            if world % ranks == 0:
                shape = (world // ranks, ranks)
                mesh = distributed.init_device_mesh("cuda", shape, mesh_dim_names=("other", "own"))
                rows += collective_times(mesh["own"].get_group(), ranks)
                rows += layers(mesh["own"], ranks)
        if rank == 0:
            machine = scaling_model.Machine(rows)
            for row in rows:
                if "split" in row:
                    row["predicted ms"] = scaling_model.predicted(machine, row)
            harness.report("scaling", rows)
            print(scaling_model.check(machine))


if __name__ == "__main__":
    main()
