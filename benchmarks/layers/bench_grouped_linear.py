"""GroupedLinear of 8 experts, m_splits on the device, against a list and torch's product in bf16.

Floor: 2 rows in out operations a GEMM, and three GEMMs in a step. Bytes that are cast
in a step of FP8: 4 for each element of x and of dy, 3 for each of the weights in each direction.
The host's time for a step is beside the GPU's. "torch bf16": torch._grouped_mm with its own
gradients, of weights that lie in one tensor, without main_grad or padding.

On an H200, 32768 rows, 7168 to 2048, forward and backward, with torch's grouped product of codes,
which takes E4M3 by E4M3 only: E4M3 3772 us, HYBRID, whose backward was decoded to bfloat16, 5302 us
(7246 us with torch's casts of the codes). With kernels of our own for any pair 3143 and 3144 us.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

import apex_te
from apex_te.recipe import CurrentScaling, DelayedScaling, Format

SHARES = [6, 2, 4, 5, 3, 4, 1, 7]  # of 32
LAYERS = [(32768, 7168, 2048), (32768, 2048, 7168), (16384, 7168, 2048), (16384, 2048, 7168)]
E4M3 = DelayedScaling(amax_history_len=16, fp8_format=Format.E4M3)
HYBRID = DelayedScaling(amax_history_len=16)
TENSORWISE = CurrentScaling(fp8_format=Format.E4M3)


def ours(
    module: Any, x: torch.Tensor, dy: torch.Tensor, splits: Any, recipe: Any, backward: bool
) -> Callable[[], None]:
    """A step of ours; ``recipe`` None: in bf16."""

    def run() -> None:
        for parameter in module.parameters():
            parameter.grad = None
        x.grad = None
        with torch.set_grad_enabled(backward), apex_te.fp8_autocast(recipe is not None, recipe):
            out = module(x, splits)
        if backward:
            out.backward(dy)

    return run


def theirs(
    weights: torch.Tensor, x: torch.Tensor, dy: torch.Tensor, ends: torch.Tensor, backward: bool
) -> Callable[[], None]:
    """torch's grouped product in bf16."""

    def run() -> None:
        weights.grad = x.grad = None
        with torch.set_grad_enabled(backward):
            out = torch._grouped_mm(x, weights.transpose(-2, -1), offs=ends)
        if backward:
            out.backward(dy)

    return run


def rows() -> Iterator[harness.Row]:
    for tokens, inputs, outputs in LAYERS:
        counts = [share * tokens // 32 for share in SHARES]
        splits = torch.tensor(counts, dtype=torch.int32, device="cuda")
        ends = splits.cumsum(0).to(torch.int32)
        x = torch.randn(tokens, inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(tokens, outputs, device="cuda", dtype=torch.bfloat16)
        module = apex_te.GroupedLinear(
            8, inputs, outputs, False, params_dtype=torch.bfloat16, device="cuda"
        )
        weights = torch.stack([w.detach() for w in module.parameters()]).requires_grad_()
        for backward in (False, True):
            calls = {
                "device": ours(module, x, dy, splits, E4M3, backward),
                "list": ours(module, x, dy, counts, E4M3, backward),
                "list, HYBRID": ours(module, x, dy, counts, HYBRID, backward),
                "device, HYBRID": ours(module, x, dy, splits, HYBRID, backward),
                "device, tensorwise": ours(module, x, dy, splits, TENSORWISE, backward),
                "device, bf16": ours(module, x, dy, splits, None, backward),
                "torch bf16": theirs(weights, x, dy, ends, backward),
            }
            times = harness.paired_us(list(calls.values()), repeats=10)
            found = dict(zip(calls, times, strict=True))
            work = 2 * tokens * inputs * outputs * (3 if backward else 1)
            device = found["device"]["us"]
            row = {
                "layer": f"{tokens} rows, {inputs} to {outputs}",
                "step": "forward + backward" if backward else "forward",
                **{f"{name} us": each["us"] for name, each in found.items()},
                "device TFLOP/s": work / device / 1e6,
                "over list": found["list"]["us"] / device,
                "over torch bf16": found["torch bf16"]["us"] / device,
            }
            if tokens == LAYERS[-1][0]:
                row["device host us"] = harness.host_us(calls["device"], calls=20, rounds=3)
                row["list host us"] = harness.host_us(calls["list"], calls=20, rounds=3)
            yield row


if __name__ == "__main__":
    harness.run("grouped_linear", rows())
