"""Host time to issue forward and backward of small layers, ours against PyTorch's in one run.

Linear of 128 tokens, 256 to 256, and a tiny Llama layer of 2 x 16 tokens, in bf16 and with each
recipe. All stacks of a layer take turns; a stack's figure is the median of its rounds, and its
ratio that to torch in bf16. Weights are quantized in every step.

    python benchmarks/layers/bench_host.py
    python benchmarks/layers/bench_host.py --layer linear --rounds 31
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import _path  # noqa: F401
import harness
import torch
import transformer_stacks as stacks

import apex_te
from apex_te.recipe import DelayedScaling

RECIPES = stacks.recipes("bf16", "delayed", "tensorwise", "blockwise")
RECIPES["delayed"] = DelayedScaling(amax_history_len=16)
TINY = {"hidden": 256, "ffn": 512, "heads": 4, "groups": 4, "llama": True}
Step = Callable[[], None]


def linear_steps() -> dict[str, Step]:
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    none, size = stacks.our_autocast(None), (128, 256)
    steps = {"torch bf16": stacks.step(torch.nn.Linear(256, 256, **options), none, size)}
    for name, recipe in RECIPES.items():
        layer, region = apex_te.Linear(256, 256, **options), stacks.our_autocast(recipe)
        steps[f"apex_te {name}"] = stacks.step(layer, region, size)
    return steps


def llama_steps() -> dict[str, Step]:
    size, none = (2, 16, TINY["hidden"]), stacks.our_autocast(None)
    te = stacks.transformer_engine()
    plain = stacks.Plain(**TINY).to("cuda", stacks.DTYPE)
    steps = {"torch bf16": stacks.step(plain, none, size)}
    for name, recipe in RECIPES.items():
        region = stacks.our_autocast(recipe)
        steps[f"apex_te {name}"] = stacks.step(stacks.layer(**TINY), region, size)
        theirs = None if te is None else stacks.their_autocast(te, name)
        if theirs is not None:
            step = stacks.step(stacks.their_layer(te, **TINY), theirs, size)
            steps[f"{stacks.TRANSFORMER_ENGINE} {name}"] = step
    return steps


LAYERS = {
    "linear": ("128 tokens, 256 to 256", linear_steps, 100),
    "llama": ("tiny Llama, 2 x 16 tokens", llama_steps, 25),
}


def in_turns(steps: dict[str, Step], calls: int, rounds: int) -> dict[str, float]:
    """Returns microseconds of a call by stack; the GPU is drained before each of its ``rounds``."""
    for step in steps.values():
        for _ in range(20):
            step()
    gc.collect()
    gc.freeze()
    one_round = functools.partial(harness.host_us, calls=calls, rounds=1, warmup=0)
    found = harness.in_turns([*steps.values()], rounds, one_round)
    return {name: each["us"] for name, each in zip(steps, found, strict=True)}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--layer", choices=[*LAYERS], help="one layer instead of both")
    parser.add_argument("--rounds", type=int, default=21, help="turns of each stack")
    options = parser.parse_args()
    rows = []
    for key in [options.layer] if options.layer else LAYERS:
        label, make, calls = LAYERS[key]
        found = in_turns(make(), calls, options.rounds)
        for name, us in found.items():
            ratio = us / found["torch bf16"]
            rows.append({"layer": label, "stack": name, "host us": us, "of torch": ratio})
    harness.report("host", rows)


if __name__ == "__main__":
    main()
