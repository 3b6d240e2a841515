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

RECIPES = {name: stacks.RECIPES[name] for name in ("bf16", "delayed", "tensorwise", "blockwise")}


def jax_step(sizes: tuple[int, int, int], chosen: recipe.Recipe | None) -> Callable[[], None]:
    """Returns a step of the Flax layer, which waits for its results; sizes as of GEMMs."""
    tokens, inner, outer = sizes
    x = jax.random.normal(jax.random.key(0), (tokens, inner), jnp.bfloat16)
    gradient = jax.random.normal(jax.random.key(1), (tokens, outer), jnp.bfloat16)
    layer = DenseGeneral(outer, use_bias=False, dtype=jnp.bfloat16)
    with te.fp8_autocast(chosen is not None, chosen):
        variables: Any = jax.jit(layer.init)(jax.random.key(2), x)

    @jax.jit
    def step(variables: Any, x: jax.Array, gradient: jax.Array) -> Any:
        with te.fp8_autocast(chosen is not None, chosen):
            y, pull = jax.vjp(layer.apply, variables, x)
            return y, pull(gradient)

    return lambda: jax.block_until_ready(step(variables, x, gradient))


def torch_step(
    sizes: tuple[int, int, int], chosen: recipe.Recipe | None, device: str
) -> Callable[[], None]:
    """Returns a step of ``apex_te.Linear``, which waits for the device."""
    tokens, inner, outer = sizes
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    linear = apex_te.Linear(inner, outer, bias=False, **options)
    x = torch.randn(tokens, inner, requires_grad=True, **options)
    gradient = torch.randn(tokens, outer, **options)

    def step() -> None:
        linear.weight.grad = x.grad = None
        with apex_te.fp8_autocast(enabled=chosen is not None, fp8_recipe=chosen):
            y = linear(x)
        y.backward(gradient)
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def ms_in_turns(steps: dict[str, Callable[[], None]], rounds: int, each: int) -> dict[str, float]:
    """Returns the least mean milliseconds of each step's rounds, after two rounds to warm up."""
    least = dict.fromkeys(steps, float("inf"))
    for index in range(rounds + 2):
        for name, step in steps.items():
            begin = time.perf_counter()
            for _ in range(each):
                step()
            if index >= 2:
                least[name] = min(least[name], (time.perf_counter() - begin) / each * 1e3)
    return least


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="small sizes, and no figures")
    options = parser.parse_args()
    sizes = (64, 64, 128) if options.tiny else (16384, 4096, 14336)
    rounds, each = (1, 1) if options.tiny else (6, 8)
    device = "cuda" if jax.devices()[0].platform == "gpu" else "cpu"
    rows: list[dict[str, Any]] = []
    for name, chosen in RECIPES.items():
        steps = {"JAX": jax_step(sizes, chosen), "PyTorch": torch_step(sizes, chosen, device)}
        found = ms_in_turns(steps, rounds, each)
        plain = rows[0]["JAX ms"] if rows else found["JAX"]
        rows.append({
            "recipe": name, "JAX ms": found["JAX"], "PyTorch ms": found["PyTorch"],
            "of PyTorch": found["JAX"] / found["PyTorch"], "of JAX's bf16": plain / found["JAX"],
        })  # fmt: skip
    if not options.tiny:
        harness.report("jax_dense", rows, jax=jax.__version__)


if __name__ == "__main__":
    main()
