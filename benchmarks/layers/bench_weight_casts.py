"""Weights cast once (``keep_columnwise_weights``) or twice: time and memory of Llama-3-8B layers.

Time: forward + backward of one layer, 2 x 4096 tokens, taking turns with the others step by step,
with a cold L2, and in blocks of steps under sustained load. Memory: the peak of a step of 1 and of
4 stacked layers with nothing else on the GPU, and by how much it exceeds what is allocated between
steps. bf16 stands beside.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
from sustained import sustained
from transformer_stacks import DTYPE, RECIPES, SHAPES, layer, peak_bytes

import apex_te

SHAPE = SHAPES["Llama-3-8B"]
BATCH, TOKENS = 2, 4096


class Step:
    """One forward and backward of stacked layers.

    Args:
        name: the recipe's name in ``RECIPES``.
        keep: cast weights once.
        layers: their number.
    """

    def __init__(self, name: str, keep: bool, layers: int = 1) -> None:
        self.scaling, self.keep = RECIPES[name], keep
        self.module = torch.nn.Sequential(*[layer(**SHAPE) for _ in range(layers)])
        self.x = torch.randn(BATCH, TOKENS, SHAPE["hidden"], device="cuda", dtype=DTYPE)
        self.dy = torch.randn_like(self.x)

    def __call__(self) -> None:
        x = self.x.detach().requires_grad_()
        for parameter in self.module.parameters():
            parameter.grad = None
        with apex_te.fp8_autocast(
            enabled=self.scaling is not None,
            fp8_recipe=self.scaling,
            keep_columnwise_weights=self.keep,
        ):
            y = self.module(x)
        y.backward(self.dy)


def peak_gib(name: str, keep: bool, layers: int) -> tuple[float, float]:
    """Returns the peak of a step, and by how much it exceeds what lies there between steps."""
    run = Step(name, keep, layers)
    for _ in range(2):
        run()
    peak, before = peak_bytes(run, run.module)
    return peak / 2**30, (peak - before) / 2**30


def main() -> None:
    kinds = [("bf16", False), *((name, keep) for name in RECIPES if name != "bf16"
                                for keep in (False, True))]  # fmt: skip
    rows: list[dict[str, Any]] = []
    for name, keep in kinds:
        row: dict[str, Any] = {"stack": name, "weights cast": "once" if keep else "twice"}
        for layers in (1, 4):
            gc.collect()
            torch.cuda.empty_cache()
            row[f"peak GiB, {layers}"], row[f"over parameters, {layers}"] = peak_gib(
                name, keep, layers
            )
        rows.append(row)
    gc.collect()
    torch.cuda.empty_cache()
    steps = {f"{name}, {keep}": Step(name, keep) for name, keep in kinds}
    turns = harness.paired_us([*steps.values()], repeats=40, warmup=8)
    loaded = sustained(dict(steps))
    for row, turn, more in zip(rows, turns, loaded.values(), strict=True):
        row |= {"ms in turns": turn["us"] / 1e3, **more}
    harness.report("weight_casts", rows)


if __name__ == "__main__":
    main()
