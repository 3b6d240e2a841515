"""The Llama-3-8B layer at token counts that are not multiples of 16, forward + backward.

2 x 4095 and 3 x 2731 tokens take turns with 2 x 4096 in one layer, cold L2, as
bench_transformer.py measures. Reported is the time per token against that of 2 x 4096 tokens.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bench_transformer
from bench_transformer import harness

COUNTS = [(2, 4096), (2, 4095), (3, 2731), (1, 8191)]


def measure(key: str, scaling: Any) -> list[dict[str, Any]]:
    shape = bench_transformer.SHAPES["Llama-3-8B"]
    module = bench_transformer.layer(**shape)
    calls = [
        bench_transformer.step(module, scaling, batch, tokens, shape["hidden"])
        for batch, tokens in COUNTS
    ]
    times = harness.paired_us(calls, repeats=25, warmup=6)
    per_token = [t["us"] / (b * n) for t, (b, n) in zip(times, COUNTS, strict=True)]
    return [
        {
            "layer": "Llama-3-8B",
            "stack": key,
            "tokens": f"{batch} x {tokens}",
            **{f"{name} ms" if name != "us" else "ms": t / 1e3 for name, t in taken.items()},
            "per token, of 2 x 4096": own / per_token[0],
        }
        for (batch, tokens), taken, own in zip(COUNTS, times, per_token, strict=True)
    ]


def rows() -> Iterator[harness.Row]:
    for key, scaling in bench_transformer.RECIPES.items():
        yield from measure(key, scaling)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    harness.run("odd_tokens_layer", rows())
