"""Losses of a plain Flax Transformer of 302M parameters, and of what ``from_flax`` makes of it.

The model of examples/jax/switch.py: 24 layers of width 1024, 16 heads, in bf16. Sequences of 1024
bytes of the sources of Python's standard library, 8 a step, in one order for all runs; AdamW, 1e-3
after 20 steps of warm-up, gradients clipped to a norm of 1. The loss is the mean of the last 20
steps; the time of a step is the median, seconds are of all steps and the compilation.

    python benchmarks/with_jax/switched.py
    JAX_PLATFORMS=cpu python benchmarks/with_jax/switched.py --tiny   # the same path, no figures
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "jax"))
import flax.linen as nn
import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from switch import Model

import apex_te.jax.flax as te_flax

RECIPES = ("delayed", "tensorwise", "blockwise")


def batches(steps: int, batch: int, length: int) -> np.ndarray:
    """Returns bytes of sources, [steps, batch, length + 1], windows in a random order."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    windows = (len(text) - 1) // length
    chosen = np.random.default_rng(0).permutation(windows)[: steps * batch]
    chosen = np.resize(chosen, steps * batch)
    return text[(chosen * length)[:, None] + np.arange(length + 1)].reshape(steps, batch, -1)


def train(model: nn.Module, data: np.ndarray) -> tuple[list[float], float]:
    """Returns the losses of all steps and the median milliseconds of one."""
    schedule = optax.linear_schedule(0.0, 1e-3, 20)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    variables = jax.jit(model.init)(jax.random.key(0), data[0, :, :-1].astype(np.int32))
    state = TrainState.create(apply_fn=model.apply, params=variables, tx=optimizer)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss(variables: Any) -> jax.Array:
            logits = state.apply_fn(variables, tokens[:, :-1]).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    losses, times = [], []
    for tokens in data:
        begin = time.perf_counter()
        state, value = step(state, jnp.asarray(tokens, jnp.int32))
        losses.append(float(value))
        times.append(1e3 * (time.perf_counter() - begin))
    return losses, statistics.median(times)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="small sizes, and no figures")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    options = parser.parse_args()
    width, heads, layers, batch, length, steps = (
        (64, 2, 1, 2, 32, 4) if options.tiny else (1024, 16, 24, 8, 1024, 200)
    )
    data = batches(steps, batch, length)
    model = Model(width, heads, layers, jnp.bfloat16, vocabulary=256)
    rows: list[dict[str, Any]] = []
    for name in ("bf16", *options.recipes):
        begin = time.perf_counter()
        losses, ms = train(model if name == "bf16" else te_flax.from_flax(model, name), data)
        last = statistics.mean(losses[-20:])
        plain = rows[0]["loss"] if rows else last
        rows.append({
            "recipe": name, "first loss": losses[0], "loss": last, "of bf16's": last / plain,
            "ms": ms, "seconds": time.perf_counter() - begin,
        })  # fmt: skip
        print(rows[-1], flush=True)
    if not options.tiny:
        harness.report("jax_switched", rows, jax=jax.__version__)


if __name__ == "__main__":
    main()
