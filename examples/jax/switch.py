#!/usr/bin/env python3
"""Trains a language model of plain Flax layers without FP8 and, by one more line, with it.

    python examples/jax/switch.py
    python examples/jax/switch.py --recipe blockwise --width 1024 --heads 16 --length 1024

The sequences count up in steps of 1 to 4, each of its own.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import apex_te.jax.flax as te_flax

VOCABULARY = 64


class Model(nn.Module):
    """Causal Transformer of Flax's layers alone; nothing here knows of FP8."""

    width: int
    heads: int
    layers: int
    dtype: Any
    vocabulary: int = VOCABULARY

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits [batch, length, vocabulary]."""
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        mask = nn.make_causal_mask(tokens)
        for _ in range(self.layers):
            h = nn.LayerNorm(dtype=self.dtype)(x)
            x = x + nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(h, mask=mask)
            h = nn.LayerNorm(dtype=self.dtype)(x)
            h = nn.gelu(nn.Dense(4 * self.width, dtype=self.dtype)(h))
            x = x + nn.Dense(self.width, dtype=self.dtype)(h)
        return nn.Dense(self.vocabulary, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))


def train(model: nn.Module, tokens: jax.Array, steps: int) -> list[float]:
    """Returns the losses of some steps on the same sequences, and prints the last and the time."""
    variables = jax.jit(model.init)(jax.random.key(0), tokens[:, :-1])
    # TrainState replaces the collection of FP8 state, where there is one, by its gradient.
    state = TrainState.create(apply_fn=model.apply, params=variables, tx=optax.adamw(1e-3))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState) -> tuple[TrainState, jax.Array]:
        def loss(variables: Any) -> jax.Array:
            logits = state.apply_fn(variables, tokens[:, :-1]).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    values, started = [], 0.0
    for number in range(steps):
        state, value = step(state)
        values.append(value.block_until_ready())
        if number == 0:
            started = time.perf_counter()  # without the compilation
    seconds = (time.perf_counter() - started) / max(steps - 1, 1)
    print(f"loss {float(values[0]):.4f} to {float(values[-1]):.4f}, {1000 * seconds:.2f} ms a step")
    return [float(value) for value in values]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="delayed", help="delayed, tensorwise, blockwise, mxfp8")
    for name, value in (
        ("width", 64), ("heads", 4), ("layers", 2), ("length", 32), ("batch", 8), ("steps", 30),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args(argv)
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    first = jax.random.randint(jax.random.key(1), (args.batch, 1), 0, VOCABULARY)
    stride = jax.random.randint(jax.random.key(2), (args.batch, 1), 1, 5)
    tokens = (first + stride * jnp.arange(args.length + 1)) % VOCABULARY

    model = Model(args.width, args.heads, args.layers, dtype)
    print(f"{jnp.dtype(dtype)}: ", end="")
    train(model, tokens, args.steps)
    model = te_flax.from_flax(model, args.recipe)  # the switch
    print(f"{args.recipe}: ", end="")
    train(model, tokens, args.steps)


if __name__ == "__main__":
    main()
