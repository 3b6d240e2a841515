"""LoRA over frozen Llama-3-8B layers: a base in bf16 of torch and apex_te, and held in FP8.

    python benchmarks/layers/bench_lora.py [--tokens 2 4096] [--layers 4] [--rank 16]

Forward and backward of 4 layers with adapters of rank 16 on all seven projections; contenders take
turns. "fused" is the same stack whose bases add the adapters, as after ``fuse_lora``. Weight bytes
are those of all parameters, adapters included; on a GPU also what the allocator holds for a model
that stands alone. Peak memory: the largest allocation in one step, weights included.
``--device cpu --shape tiny`` tries the program.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import _path  # noqa: F401
import harness
import lora_stack
import torch
import transformer_stacks as stacks
from torch import nn

import apex_te
from apex_te import recipe

CONTENDERS: dict[str, tuple[str, recipe.Recipe | None, bool]] = {
    "torch bf16": ("torch", None, False),
    "apex_te bf16": ("apex_te", None, False),
    **{
        f"apex_te FP8, {name}" + ", fused" * fused: ("apex_te", stacks.RECIPES[name], fused)
        for fused in (False, True)
        for name in ("delayed", "tensorwise", "blockwise")
    },
}


def step_of(
    model: nn.Module, scaling: recipe.Recipe | None, x: torch.Tensor, dy: torch.Tensor
) -> Callable[[], list[torch.Tensor]]:
    trained = [p for p in model.parameters() if p.requires_grad]

    def step() -> list[torch.Tensor]:
        with apex_te.fp8_autocast(enabled=scaling is not None, fp8_recipe=scaling):
            out = model(x)
        return list(torch.autograd.grad(out, trained, dy))

    return step


def times_in_turns(steps: list[Callable[[], Any]], device: str, repeats: int) -> list[float]:
    if device == "cuda":
        return [row["us"] / 1e3 for row in harness.paired_us(steps, repeats=repeats, warmup=4)]
    for call in steps:
        call()
    one_call = functools.partial(harness.host_us, calls=1, rounds=1, warmup=0)
    return [row["us"] / 1e3 for row in harness.in_turns(steps, repeats, one_call)]


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--shape", choices=lora_stack.SHAPES, default="Llama-3-8B")
    parser.add_argument("--tokens", type=int, nargs=2, default=(2, 4096), help="batch and length")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    shape = lora_stack.SHAPES[args.shape]
    dtype = torch.bfloat16
    x = torch.randn(*args.tokens, shape.hidden, device=args.device, dtype=dtype)
    rows: list[dict[str, Any]] = []
    steps, reference = [], None
    for name, (kind, scaling, fused) in CONTENDERS.items():
        given = shape, args.layers, kind, scaling, args.rank, args.device, dtype, fused
        model, held, _ = harness.memory(functools.partial(lora_stack.make_stack, *given))
        with torch.no_grad():  # adapters as in the middle of a training
            for parameter in model.parameters():
                if parameter.requires_grad:
                    torch.manual_seed(parameter.shape[0])
                    parameter.normal_(0, 0.02)
        torch.manual_seed(1)
        step = step_of(model, scaling, x, torch.randn_like(x))
        for _ in range(2):
            step()
        gradients, _, peak = harness.memory(step)
        weights = sum(map(lora_stack.tensor_bytes, model.parameters()))
        reference = reference or gradients
        row = {"stack": name, "weight MiB": weights / 2**20}
        row["of bf16"] = row["weight MiB"] / rows[0]["weight MiB"] if rows else 1.0
        if args.device == "cuda":
            row |= {"allocated MiB": held / 2**20, "peak MiB": (held + peak) / 2**20}
        row["gradients differ by"] = statistics.mean(harness.distances(gradients, reference))
        rows.append(row)
        steps.append(step)
        del gradients
    times = times_in_turns(steps, args.device, args.repeats)
    for row, ms in zip(rows, times, strict=True):
        row |= {"ms": ms, "time of torch's": ms / times[0], "time of our bf16": ms / times[1]}
    harness.report(
        "lora", rows, shape=args.shape, tokens=list(args.tokens), layers=args.layers, rank=args.rank
    )


if __name__ == "__main__":
    main()
