"""Attention with sequences split over 2 or 4 GPUs, beside one GPU's share of the whole sequence.

``python benchmarks/layers/bench_context_parallel.py`` starts a rank per GPU. Heads are those of
Llama-3-8B, batch 1, causal or in a window of 1023 tokens, bf16, forward and backward. "share ms" is
the time of the whole sequence on one GPU, divided by the number of ranks; "over share" is the
ratio to it. Calls run in a row, contenders take turns, and the slowest rank counts. Methods that
begin with "te" are Transformer Engine's, where it is installed. "peak GiB above" is what a call
needs above inputs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import _path  # noqa: F401
import harness
import rank_runs
import torch
from torch import distributed

import apex_te

METHODS = ("all_gather", "a2a")
TE_METHODS = ("p2p", "all_gather", "a2a")


class Sizes(NamedTuple):
    """Sizes of whole sequences; ``steps`` in a row are timed ``rounds`` times."""

    tokens: tuple[int, ...]
    heads: int
    groups: int
    size: int
    window: int
    steps: int
    rounds: int


LLAMA = Sizes((32768, 65536, 131072), 32, 8, 128, 1023, 3, 5)
TINY = Sizes((64,), 4, 2, 8, 7, 1, 1)


def call_of(module: torch.nn.Module, inputs: list[torch.Tensor]) -> Callable[[], torch.Tensor]:
    *leaves, grad = inputs

    def run() -> torch.Tensor:
        for leaf in leaves:
            leaf.grad = None
        out: torch.Tensor = module(*leaves)
        out.backward(grad)
        return out.detach()

    return run


def contenders(sizes: Sizes, window: int | None) -> dict[str, torch.nn.Module]:
    """Returns the modules by method; "one" has whole sequences."""
    kind: dict[str, Any] = {"attn_mask_type": "causal", "qkv_format": "sbhd"}
    kind["window_size"] = None if window is None else (window, 0)
    shape = (sizes.heads, sizes.size, sizes.groups)
    group = distributed.group.WORLD
    ranks = distributed.get_process_group_ranks(group)
    found: dict[str, torch.nn.Module] = {"one": apex_te.DotProductAttention(*shape, **kind)}
    own = apex_te.DotProductAttention
    for method in METHODS:
        found[method] = own(*shape, **kind, cp_group=group, cp_comm_type=method)
    if importlib.util.find_spec("transformer_engine") and torch.cuda.is_available():
        from transformer_engine.pytorch import DotProductAttention

        for method in TE_METHODS[1 if window else 0 :]:
            module = DotProductAttention(*shape, **kind).cuda()
            module.set_context_parallel_group(group, ranks, torch.cuda.Stream(), method)
            found[f"te {method}"] = module
    return found


def measured(sizes: Sizes, device: torch.device) -> list[dict[str, Any]]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    group = distributed.group.WORLD
    ranks, rows = distributed.get_world_size(), []
    for tokens in sizes.tokens:
        torch.manual_seed(1)  # the same on all ranks
        heads = (sizes.heads, sizes.groups, sizes.groups)
        whole = [torch.randn(tokens, 1, n, sizes.size, device=device, dtype=dtype) for n in heads]
        whole.append(torch.randn(tokens, 1, sizes.heads * sizes.size, device=device, dtype=dtype))
        own = [apex_te.split_for_context_parallel(x, group, 0) for x in whole]
        for x in (*whole[:3], *own[:3]):
            x.requires_grad_()
        for window in (None, sizes.window):
            modules = contenders(sizes, window)
            calls = {name: call_of(module, whole if name == "one" else own)
                     for name, module in modules.items()}  # fmt: skip
            expected = apex_te.split_for_context_parallel(calls["one"](), group, 0)
            errors = {name: float((call() - expected).abs().max()) for name, call in calls.items()
                      if name != "one"}  # fmt: skip
            peaks: dict[str, float | None] = dict.fromkeys(calls)
            if device.type == "cuda":
                peaks |= {name: harness.peak_gib(call) for name, call in calls.items()}
            found = rank_runs.milliseconds(list(calls.values()), sizes.rounds, sizes.steps, device)
            times = dict(zip(calls, found, strict=True))
            share = times.pop("one") / ranks
            for name, ms in times.items():
                path = getattr(modules[name], "explain", lambda *args: "")(*own[:3])
                rows.append({
                    "tokens": tokens, "window": window or 0, "method": name, "ms": ms,
                    "share ms": share, "over share": ms / share, "peak GiB above": peaks[name],
                    "largest difference": errors[name], "path": path,
                })  # fmt: skip
    return rows


if __name__ == "__main__":
    rank_runs.run("context_parallel", __doc__, measured, LLAMA, TINY)
