#!/usr/bin/env python3
"""Trains one Transformer layer in FP8 with JAX, Flax and optax, in a few lines.

python examples/jax/quickstart.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax.core import pop

import apex_te.jax as te
import apex_te.jax.flax as te_flax
from apex_te import recipe

STEPS = 20
HIDDEN = 64


def main() -> list[float]:
    """Trains; returns the losses."""
    model = te_flax.TransformerLayer(
        HIDDEN, 4 * HIDDEN, 4, hidden_dropout=0.0, attention_dropout=0.0
    )
    x = jax.random.normal(jax.random.key(0), (4, 32, HIDDEN))
    target = jnp.roll(x, 1, axis=1)  # each token's predecessor
    optimizer = optax.adamw(1e-2)

    with te.fp8_autocast(enabled=True, fp8_recipe=recipe.DelayedScaling(amax_history_len=16)):
        variables = jax.jit(lambda: model.init(jax.random.key(1), x, deterministic=True))()
        params, state = variables["params"], {"fp8_metas": variables["fp8_metas"]}

        @jax.jit
        def step(params, state, moments):
            def loss(variables):
                y = model.apply(variables, x, deterministic=True)
                return ((y - target) ** 2).mean()

            value, grads = jax.value_and_grad(loss)({"params": params, **state})
            # The gradient of the FP8 state is the next state; optimizers see the others' alone.
            new_state, grads = pop(grads, "params")
            updates, moments = optimizer.update(grads, moments, params)
            params = optax.apply_updates(params, updates)
            return params, te.update_collections(new_state, state), moments, value

        moments = optimizer.init(params)
        losses = []
        for number in range(STEPS):
            params, state, moments, value = step(params, state, moments)
            losses.append(float(value))
            if number % 5 == 0 or number == STEPS - 1:
                print(f"step {number}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
