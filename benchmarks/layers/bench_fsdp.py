"""Llama-3-8B layers under FSDP2 whose all-gathers carry FP8 data, against bfloat16 gathers.

``torchrun --nproc_per_node 2 benchmarks/layers/bench_fsdp.py``: LAYERS decoder layers, each sharded
by ``fully_shard``, 4096 tokens a rank, whole training steps (forward, backward, AdamW) in FP8, with
delayed and with tensorwise scaling. Payload is counted at the collective: what a rank gathers in
one step. The same seeds and data for both; 20 losses are compared bit for bit, with PyTorch's
deterministic algorithms. Times are those of the slowest rank, without them: of a step that begins
with an empty device, of one of several that follow each other, and of the host alone.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

# Read by cuBLAS as it is loaded.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import _path  # noqa: F401
import harness
import torch
from llama_ranks import HIDDEN, TOKENS, of_ranks, report, sharded
from torch import distributed

import apex_te
from apex_te import recipe

LAYERS, STEPS = 3, 20
RECIPES = {"delayed": recipe.DelayedScaling(), "tensorwise": recipe.CurrentScaling()}


def step(model: torch.nn.Module, scaling: recipe.Recipe) -> Callable[[int], torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5, fused=True)
    rank = distributed.get_rank()

    def run(index: int = 0) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(2 * index + rank)
        x = torch.randn(TOKENS, 1, HIDDEN, device="cuda", dtype=torch.bfloat16, generator=generator)
        with apex_te.fp8_autocast(True, scaling):
            loss = (model(x) - x.roll(1, 0)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Bytes of the all-gathers, and how many collectives reduce a maximum."""
    counts = {"bytes": 0, "maxima": 0}
    # What FSDP2 calls has another name in torch 2.13.
    names = ("all_reduce", "all_gather_into_tensor", "all_gather_single")
    kept = {name: getattr(distributed, name) for name in names if hasattr(distributed, name)}

    def counting(original: Any) -> Any:
        def gather(output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
            counts["bytes"] += output_tensor.numel() * output_tensor.element_size()
            return original(output_tensor, *args, **kwargs)

        return gather

    def reduce(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        counts["maxima"] += kwargs.get("op") == distributed.ReduceOp.MAX
        return kept["all_reduce"](tensor, *args, **kwargs)

    stand_ins = {name: counting(original) for name, original in kept.items()}
    with mock.patch.multiple(distributed, **{**stand_ins, "all_reduce": reduce}):
        yield counts


def losses_of(scaling: recipe.Recipe, fp8: bool) -> tuple[torch.Tensor, dict[str, int]]:
    """20 losses, and what the last step sent."""
    torch.use_deterministic_algorithms(True)
    run = step(sharded(LAYERS, scaling if fp8 else None), scaling)
    losses = [run(i) for i in range(STEPS - 1)]
    with counted() as counts:
        losses.append(run(STEPS - 1))
    torch.use_deterministic_algorithms(False)
    apex_te.flush_fp8_state()
    return torch.stack(losses).cpu(), counts


IN_A_ROW = 5


def measured(runs: dict[str, Callable[[], Any]], repeats: int = 12) -> dict[str, dict[str, float]]:
    """Returns median times of the slowest rank for each run; the runs take turns."""
    times: dict[str, dict[str, list[float]]] = {}
    for name, run in runs.items():
        for _ in range(4):
            run()
        times[name] = {"ms": [], "ms in a row": [], "host ms": []}
    for repeat in range(repeats):
        for name, run in runs.items():
            found = times[name]
            distributed.barrier()
            found["ms"].append(harness.kernel_us(run, 1, 0)["us"] / 1e3)
            distributed.barrier()
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            found["host ms"].append((time.perf_counter() - start) * 1e3)
            if repeat % 3 == 0:
                torch.cuda.synchronize()
                row = harness.kernel_us(lambda run=run: [run() for _ in range(IN_A_ROW)], 1, 0)
                found["ms in a row"].append(row["us"] / 1e3 / IN_A_ROW)
    return {name: {key: of_ranks(v) for key, v in found.items()} for name, found in times.items()}


def compared() -> Iterator[harness.Row]:
    torch.utils.deterministic.fill_uninitialized_memory = False
    for name, scaling in RECIPES.items():
        (ours, sent), (theirs, plain) = (losses_of(scaling, fp8) for fp8 in (True, False))
        equal = torch.tensor([torch.equal(ours, theirs)], dtype=torch.int32, device="cuda")
        distributed.all_reduce(equal, op=distributed.ReduceOp.MIN)
        runs, peaks = {}, {}
        for gather in ("FP8", "bf16"):
            gc.collect()  # models that are gone
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            model = sharded(LAYERS, scaling if gather == "FP8" else None)
            runs[gather] = step(model, scaling)
            runs[gather]()
            model_bytes = torch.cuda.memory_allocated() - before
            peaks[gather] = (model_bytes + harness.memory(runs[gather])[2]) / 1e9
        times = measured(runs)
        apex_te.flush_fp8_state()
        for gather, counts, losses in (("FP8", sent, ours), ("bf16", plain, theirs)):
            yield {
                "layers": f"{LAYERS} x Llama-3-8B",
                "stack": f"apex_te {name}",
                "ranks": distributed.get_world_size(),
                "gather": gather,
                "gathered bytes a step": counts["bytes"],
                "of bf16": counts["bytes"] / plain["bytes"],
                "MAX reductions a step": counts["maxima"],
                "losses equal": bool(equal.item()),
                "last loss": losses[-1].item(),
                **times[gather],
                "peak memory GB": peaks[gather],
            }


if __name__ == "__main__":
    report("fsdp", compared)
