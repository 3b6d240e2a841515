"""``fused_adam`` against optax's ``adamw`` and PyTorch's ``FusedAdam``, a step of a model's size.

bf16 parameters and gradients with fp32 master weights and moments, in the shapes of a Llama-3-8B's
layers; optax's steps have fp32 parameters in place of master weights, and cast them. The jitted
steps donate parameters and state. All take turns in one process, round by round, best of the
rounds' means; a step ends when its results are there.

    python benchmarks/with_jax/bench_optimizers.py
    JAX_PLATFORMS=cpu python benchmarks/with_jax/bench_optimizers.py --tiny   # no figures
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import torch
from bench_dense import ms_in_turns

from apex_te.optimizers import FusedAdam

# After torch, whose threads an op's CPU library would else not have; see docs/jax.md.
import jax  # isort: skip
import jax.numpy as jnp  # isort: skip
import optax  # isort: skip
from apex_te.jax.optimizers import fused_adam  # isort: skip

# Of one layer, in units of the model's width.
SHAPES = [(1, 1), (1.5, 1), (1, 1), (7, 1), (1, 3.5), (1,), (1,)]
OPTIONS = {"weight_decay": 0.1}


def shapes_of(width: int, layers: int) -> list[tuple[int, ...]]:
    """Returns the shapes of all parameters."""
    return [tuple(int(width * extent) for extent in shape) for shape in SHAPES] * layers


def fused_step(shapes: list[tuple[int, ...]], how: str) -> Callable[[], None]:
    """Returns a step of ``fused_adam``.

    Args:
        shapes: shapes of the parameters.
        how: "step", or "update" with ``optax.apply_updates``.
    """
    tx = fused_adam(1e-4, **OPTIONS, master_weights=True)
    params = [jnp.ones(shape, jnp.bfloat16) for shape in shapes]
    grads = [jnp.full(shape, 1e-3, jnp.bfloat16) for shape in shapes]

    def updated(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return _looped(tx.step if how == "step" else updated, params, tx.init(params), grads)


def optax_step(shapes: list[tuple[int, ...]]) -> Callable[[], None]:
    """Returns a step of optax's ``adamw`` on fp32 parameters, whose bf16 copies it makes."""
    tx = optax.adamw(1e-4, **OPTIONS)
    masters = [jnp.ones(shape) for shape in shapes]
    grads = [jnp.full(shape, 1e-3, jnp.bfloat16) for shape in shapes]

    def step(masters: Any, state: Any, grads: Any) -> Any:
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, state = tx.update(grads, state, masters)
        masters = optax.apply_updates(masters, updates)
        return masters, state, jax.tree.map(lambda p: p.astype(jnp.bfloat16), masters)

    return _looped(step, masters, tx.init(masters), grads)


def _looped(step: Callable[..., Any], params: Any, state: Any, grads: Any) -> Callable[[], None]:
    """Returns a function that runs a jitted step on its own results."""
    run = jax.jit(step, donate_argnums=(0, 1))
    held = [params, state]

    def once() -> None:
        held[0], held[1], *rest = run(*held, grads)
        jax.block_until_ready((held, rest))

    return once


def torch_step(shapes: list[tuple[int, ...]], device: str) -> Callable[[], None]:
    """Returns a step of PyTorch's ``FusedAdam``, which waits for the device."""
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    params = [torch.ones(shape, **options).requires_grad_() for shape in shapes]
    for p in params:
        p.grad = torch.full_like(p, 1e-3)
    optimizer = FusedAdam(params, 1e-4, **OPTIONS, master_weights=True)

    def once() -> None:
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return once


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes, and no figures")
    tiny = parser.parse_args().tiny
    shapes = shapes_of(64, 2) if tiny else shapes_of(4096, 8)
    rounds, each = (1, 1) if tiny else (6, 8)
    device = "cuda" if jax.devices()[0].platform == "gpu" else "cpu"
    steps = {
        "fused_adam, step": fused_step(shapes, "step"),
        "fused_adam, update": fused_step(shapes, "update"),
        "optax.adamw": optax_step(shapes),
        "PyTorch FusedAdam": torch_step(shapes, device),
    }
    found = ms_in_turns(steps, rounds, each)
    least = found["PyTorch FusedAdam"]
    rows = [{"step": n, "ms": ms, "of PyTorch": ms / least} for n, ms in found.items()]
    if not tiny:
        harness.report("jax_optimizers", rows, jax=jax.__version__)


if __name__ == "__main__":
    main()
