"""A Flax ``MoEBlock`` in FP8 against ``apex_te.MoELayer``: Qwen3-30B-A3B's experts.

8192 tokens, 8 of 128 experts each, 2048 to 768, bf16, forward + backward with gradients of the
input and all weights, router included, weights quantized in every step; ``jax.jit`` of the whole
step, PyTorch eager. JAX and PyTorch take turns in one process, round by round, best of the rounds'
means; a step of JAX ends when its outputs are there. In bf16 JAX multiplies every group with all
rows, so it has no row here.

    python benchmarks/with_jax/bench_moe.py
    JAX_PLATFORMS=cpu python benchmarks/with_jax/bench_moe.py --tiny   # the same path, no figures
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from bench_dense import RECIPES, harness, ms_in_turns

import apex_te
from apex_te import recipe

# After torch; see bench_dense.
import jax  # isort: skip
import jax.numpy as jnp  # isort: skip
import apex_te.jax as te  # isort: skip
from apex_te.jax.flax import MoEBlock  # isort: skip

Sizes = tuple[int, int, int, int, int]  # tokens, top k, hidden, ffn, experts


def jax_step(sizes: Sizes, chosen: recipe.Recipe) -> Callable[[], None]:
    """Returns a step of the Flax layer, which waits for its results."""
    tokens, top_k, hidden, ffn, experts = sizes
    keys = jax.random.split(jax.random.key(0), 2)
    x, gradient = (jax.random.normal(key, (tokens, hidden), jnp.bfloat16) for key in keys)
    layer = MoEBlock(experts, top_k, ffn, dtype=jnp.bfloat16)
    with te.fp8_autocast(True, chosen):
        variables: Any = jax.jit(layer.init)(jax.random.key(2), x)

    @jax.jit
    def step(variables: Any, x: jax.Array, gradient: jax.Array) -> Any:
        with te.fp8_autocast(True, chosen):
            y, pull = jax.vjp(lambda *given: layer.apply(*given)[0], variables, x)
            return y, pull(gradient)

    return lambda: jax.block_until_ready(step(variables, x, gradient))


def torch_step(sizes: Sizes, chosen: recipe.Recipe, device: str) -> Callable[[], None]:
    """Returns a step of ``apex_te.MoELayer``, which waits for the device."""
    tokens, top_k, hidden, ffn, experts = sizes
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    layer = apex_te.MoELayer(hidden, ffn, experts, top_k, **options)
    x = torch.randn(tokens, hidden, requires_grad=True, **options)
    gradient = torch.randn(tokens, hidden, **options)

    def step() -> None:
        layer.zero_grad()
        x.grad = None
        with apex_te.fp8_autocast(fp8_recipe=chosen):
            y = layer(x)
        y.backward(gradient)
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="small sizes, and no figures")
    options = parser.parse_args()
    sizes = (32, 2, 128, 128, 4) if options.tiny else (8192, 8, 2048, 768, 128)
    rounds, each = (1, 1) if options.tiny else (6, 8)
    device = "cuda" if jax.devices()[0].platform == "gpu" else "cpu"
    rows: list[dict[str, Any]] = []
    for name, chosen in RECIPES.items():
        if chosen is None:
            continue
        steps = {"JAX": jax_step(sizes, chosen), "PyTorch": torch_step(sizes, chosen, device)}
        found = ms_in_turns(steps, rounds, each)
        rows.append({
            "recipe": name, "JAX ms": found["JAX"], "PyTorch ms": found["PyTorch"],
            "of PyTorch": found["JAX"] / found["PyTorch"],
        })  # fmt: skip
    if not options.tiny:
        harness.report("jax_moe", rows, jax=jax.__version__)


if __name__ == "__main__":
    main()
