"""FP8 Linear against bf16 nn.Linear: GPU time of a large layer, host time of a small one.

Forward and backward with delayed scaling; weights are quantized in every step; no gradient
accumulation.
"""

from __future__ import annotations

import sys
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


def main() -> None:
    rows = []
    clock = harness.sm_clock_mhz()
    for tokens, inputs, outputs in ((16384, 4096, 14336), (16384, 14336, 4096), (8192, 4096, 4096)):
        fp8, bf16 = harness.paired_us(list(pair(tokens, inputs, outputs)), repeats=20, warmup=8)
        rows.append(
            {
                "layer": f"{tokens} tokens, {inputs} to {outputs}",
                "measure": "GPU, forward + backward",
                "FP8 us": fp8["us"],
                "nn.Linear bf16 us": bf16["us"],
                "ratio": bf16["us"] / fp8["us"],
            }
        )
    ours, theirs = pair(128, 256, 256)
    host = harness.host_us(ours), harness.host_us(theirs)
    rows.append(
        {
            "layer": "128 tokens, 256 to 256",
            "measure": "host, forward + backward",
            "FP8 us": host[0],
            "nn.Linear bf16 us": host[1],
            "ratio": host[1] / host[0],
        }
    )
    harness.report("linear", rows, sm_clock_mhz=f"{clock} to {harness.sm_clock_mhz()}")


if __name__ == "__main__":
    main()
