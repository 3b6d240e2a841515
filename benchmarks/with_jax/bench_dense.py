"""A Flax ``DenseGeneral`` in FP8 against ``apex_te.Linear``, and against itself in bf16.

16384 tokens, 4096 to 14336, bf16, no bias, forward + backward with gradients of input and weight,
weights quantized in every step; ``jax.jit`` of the whole step, PyTorch eager. JAX and PyTorch take
turns in one process, round by round, best of the rounds' means; a step of JAX ends when its outputs
are there.

    python benchmarks/with_jax/bench_dense.py
    JAX_PLATFORMS=cpu python benchmarks/with_jax/bench_dense.py --tiny   # the same path, no figures
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import torch
import transformer_stacks as stacks

import apex_te
from apex_te import recipe

# After torch, whose threads an op's CPU library would else not have; see docs/jax.md.
import jax  # isort: skip
import jax.numpy as jnp  # isort: skip
import apex_te.jax as te  # isort: skip
from apex_te.jax.flax import DenseGeneral  # isort: skip

RECIPES = stacks.recipes("bf16", "delayed", "tensorwise", "blockwise")


Sizes = tuple[int, int, int]  # tokens, and features of a row of input and output
Step = Callable[[], None]


def jax_step(layer: Any, apply: Callable[..., Any], sizes: Sizes, chosen: Any) -> Step:
    """Returns a step of a Flax layer by ``apply``, which waits for its results."""
    tokens, inner, outer = sizes
    x = jax.random.normal(jax.random.key(0), (tokens, inner), jnp.bfloat16)
    gradient = jax.random.normal(jax.random.key(1), (tokens, outer), jnp.bfloat16)
    with te.fp8_autocast(chosen is not None, chosen):
        variables: Any = jax.jit(layer.init)(jax.random.key(2), x)

    @jax.jit
    def step(variables: Any, x: jax.Array, gradient: jax.Array) -> Any:
        with te.fp8_autocast(chosen is not None, chosen):
            y, pull = jax.vjp(apply, variables, x)
            return y, pull(gradient)

    return lambda: jax.block_until_ready(step(variables, x, gradient))


def torch_step(layer: torch.nn.Module, sizes: Sizes, chosen: Any, device: str) -> Step:
    """Returns a step of a PyTorch layer, which waits for the device."""
    tokens, inner, outer = sizes
    x = torch.randn(tokens, inner, device=device, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(tokens, outer, device=device, dtype=torch.bfloat16)

    def step() -> None:
        layer.zero_grad()
        x.grad = None
        with apex_te.fp8_autocast(enabled=chosen is not None, fp8_recipe=chosen):
            y = layer(x)
        y.backward(gradient)
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def ms_in_turns(steps: dict[str, Step], tiny: bool) -> dict[str, float]:
    """Returns the least mean milliseconds of each step's rounds, after two rounds to warm up."""
    rounds, each = (1, 1) if tiny else (6, 8)
    least = dict.fromkeys(steps, float("inf"))
    for index in range(rounds + 2):
        for name, step in steps.items():
            begin = time.perf_counter()
            for _ in range(each):
                step()
            if index >= 2:
                least[name] = min(least[name], (time.perf_counter() - begin) / each * 1e3)
    return least


def run(
    name: str,
    doc: str | None,
    steps: Callable[[Any, Any, str], dict[str, Step]],
    sizes: Any,
    tiny_sizes: Any,
    recipes: dict[str, recipe.Recipe | None] = RECIPES,
) -> None:
    """Times ``steps(sizes, recipe, device)`` of JAX and PyTorch with each recipe, and reports."""
    parser = harness.parser(doc)
    parser.add_argument("--tiny", action="store_true", help="small sizes, and no figures")
    tiny = parser.parse_args().tiny
    device = "cuda" if jax.devices()[0].platform == "gpu" else "cpu"
    rows: list[dict[str, Any]] = []
    for key, chosen in recipes.items():
        found = ms_in_turns(steps(tiny_sizes if tiny else sizes, chosen, device), tiny)
        row = {"recipe": key, **{f"{each} ms": ms for each, ms in found.items()}}
        rows.append({**row, "of PyTorch": found["JAX"] / found["PyTorch"]})
        if "bf16" in recipes:
            rows[-1]["of JAX's bf16"] = rows[0]["JAX ms"] / found["JAX"]
    if not tiny:
        harness.report(name, rows, jax=jax.__version__)


def dense_steps(sizes: Sizes, chosen: Any, device: str) -> dict[str, Step]:
    _, inner, outer = sizes
    layer = DenseGeneral(outer, use_bias=False, dtype=jnp.bfloat16)
    linear = apex_te.Linear(inner, outer, bias=False, device=device, dtype=torch.bfloat16)
    ours = jax_step(layer, layer.apply, sizes, chosen)
    return {"JAX": ours, "PyTorch": torch_step(linear, sizes, chosen, device)}


if __name__ == "__main__":
    run("jax_dense", __doc__, dense_steps, (16384, 4096, 14336), (64, 64, 128))
