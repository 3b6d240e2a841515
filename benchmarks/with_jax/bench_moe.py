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

from typing import Any

import torch
from bench_dense import Step, jax_step, run, stacks, torch_step

import apex_te

# After torch; see bench_dense.
import jax.numpy as jnp  # isort: skip
from apex_te.jax.flax import MoEBlock  # isort: skip

Sizes = tuple[int, int, int, int, int]  # tokens, top k, hidden, ffn, experts


def moe_steps(sizes: Sizes, chosen: Any, device: str) -> dict[str, Step]:
    tokens, top_k, hidden, ffn, experts = sizes
    block = MoEBlock(experts, top_k, ffn, dtype=jnp.bfloat16)
    layer = apex_te.MoELayer(hidden, ffn, experts, top_k, device=device, dtype=torch.bfloat16)
    rows = (tokens, hidden, hidden)
    ours = jax_step(block, lambda *given: block.apply(*given)[0], rows, chosen)
    return {"JAX": ours, "PyTorch": torch_step(layer, rows, chosen, device)}


if __name__ == "__main__":
    recipes = stacks.recipes("delayed", "tensorwise", "blockwise")
    run("jax_moe", __doc__, moe_steps, (8192, 8, 2048, 768, 128), (32, 2, 128, 128, 4), recipes)
