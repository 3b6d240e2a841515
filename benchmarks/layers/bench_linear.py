"""FP8 Linear against bf16 nn.Linear: GPU time of a large layer, host time of a small one.

Forward and backward with delayed scaling; weights are quantized in every step; no gradient
accumulation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

import apex_te


def step(module, x, dy, fp8: bool):
    recipe = apex_te.recipe.DelayedScaling(amax_history_len=16)

    def run():
        module.weight.grad = module.bias.grad = x.grad = None
        with apex_te.fp8_autocast(enabled=fp8, fp8_recipe=recipe):
            y = module(x)
        y.backward(dy)

    return run


def pair(tokens: int, inputs: int, outputs: int):
    x = torch.randn(tokens, inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(tokens, outputs, device="cuda", dtype=torch.bfloat16)
    ours = apex_te.Linear(inputs, outputs, params_dtype=torch.bfloat16, device="cuda")
    theirs = torch.nn.Linear(inputs, outputs, dtype=torch.bfloat16, device="cuda")
    return step(ours, x, dy, True), step(theirs, x, dy, False)


def row(layer: str, measure: str, fp8_us: float, bf16_us: float) -> harness.Row:
    times = {"FP8 us": fp8_us, "nn.Linear bf16 us": bf16_us, "ratio": bf16_us / fp8_us}
    return {"layer": layer, "measure": f"{measure}, forward + backward", **times}


def rows() -> Iterator[harness.Row]:
    for tokens, inputs, outputs in ((16384, 4096, 14336), (16384, 14336, 4096), (8192, 4096, 4096)):
        fp8, bf16 = harness.paired_us(list(pair(tokens, inputs, outputs)), repeats=20, warmup=8)
        yield row(f"{tokens} tokens, {inputs} to {outputs}", "GPU", fp8["us"], bf16["us"])
    yield row("128 tokens, 256 to 256", "host", *map(harness.host_us, pair(128, 256, 256)))


if __name__ == "__main__":
    harness.run("linear", rows())
