"""Common part of the JAX examples: the command line, the training loop and the figures."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import apex_te.jax as te
from apex_te.recipe import DelayedScaling, Recipe, make_recipe

HISTORY = 16  # amaxes that delayed scaling looks back on: the runs are short
RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")


class Data(NamedTuple):
    """Examples and their classes.

    Attributes:
        inputs: arrays whose first dimension is the examples, as the model takes them.
        labels: int32 [examples].
    """

    inputs: tuple[np.ndarray, ...]
    labels: np.ndarray

    def take(self, index: np.ndarray) -> Data:
        """Returns the examples of ``index``."""
        return Data(tuple(x[index] for x in self.inputs), self.labels[index])


def add_arguments(
    parser: argparse.ArgumentParser, *, epochs: int, batch: int, lr: float
) -> argparse.ArgumentParser:
    """Adds the arguments that every example takes."""
    add = parser.add_argument
    add("--use-fp8", action="store_true", help="train in FP8, instead of fp32 or, on a GPU, bf16")
    add("--fp8-recipe", choices=RECIPES, default=RECIPES[0])
    add("--fp8-format", choices=("e4m3", "hybrid", "hif8"), help="default: the recipe's own")
    add("--epochs", type=int, default=epochs)
    add("--max-steps", type=int, help="stop after so many steps")
    add("--batch-size", type=int, default=batch)
    add("--lr", type=float, default=lr)
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="write the figures into this JSON file")
    return parser


def recipe_of(args: argparse.Namespace) -> Recipe | None:
    """Returns the recipe of the command line, None without ``--use-fp8``."""
    if not args.use_fp8:
        return None
    chosen = make_recipe(args.fp8_recipe, args.fp8_format)
    if isinstance(chosen, DelayedScaling):
        return DelayedScaling(fp8_format=chosen.fp8_format, amax_history_len=HISTORY)
    return chosen


def compute_dtype() -> Any:
    """Returns the dtype of layers outside of FP8: bf16 on a GPU, fp32 on a CPU."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def batches(data: Data, size: int, random: np.random.Generator) -> Iterator[Data]:
    """Yields the examples in a new order, in batches of one size."""
    order = random.permutation(len(data.labels))
    for start in range(0, len(order) - size + 1, size):
        yield data.take(order[start : start + size])


class Programs(NamedTuple):
    """Compiled functions of a model, in FP8 if there is a recipe.

    Attributes:
        init: function of (key, *inputs) that returns the variables.
        step: function of (variables, moments, batch, key) that returns new ones and the loss.
        count_right: function of (variables, batch) that returns how many classes are right.
    """

    init: Callable[..., Any]
    step: Callable[..., Any]
    count_right: Callable[..., jax.Array]


def compile_programs(
    model: nn.Module, optimizer: optax.GradientTransformation, chosen: Recipe | None
) -> Programs:
    """Returns a model's programs; each is traced inside of the region that makes it FP8."""

    @jax.jit
    def init(key: jax.Array, *inputs: jax.Array) -> Any:
        with te.fp8_autocast(chosen is not None, chosen):
            variables = model.init({"params": key}, *inputs, disable_dropout=True)
        return {name: variables[name] for name in ("params", "fp8_metas") if name in variables}

    @jax.jit
    def step(variables: Any, moments: Any, batch: Data, key: jax.Array) -> Any:
        def loss(variables: Any) -> jax.Array:
            logits = model.apply(
                variables, *batch.inputs, disable_dropout=False, rngs={"dropout": key}
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(
                logits.astype(jnp.float32), batch.labels
            )
            return losses.mean()

        with te.fp8_autocast(chosen is not None, chosen):
            value, grads = jax.value_and_grad(loss)(variables)
        params = variables["params"]
        updates, moments = optimizer.update(grads.pop("params"), moments, params)
        # What is left of the gradients is the next FP8 state.
        variables = {**variables, **grads, "params": optax.apply_updates(params, updates)}
        return variables, moments, value

    @jax.jit
    def count_right(variables: Any, batch: Data) -> jax.Array:
        with te.fp8_autocast(chosen is not None, chosen):
            logits = model.apply(variables, *batch.inputs, disable_dropout=True)
        return (logits.argmax(-1) == batch.labels).sum()

    return Programs(init, step, count_right)


def accuracy(programs: Programs, variables: Any, data: Data, size: int) -> float:
    """Returns the share of examples whose class is found, in whole batches of ``size``."""
    starts = range(0, len(data.labels) - size + 1, size)
    batches = (data.take(np.arange(start, start + size)) for start in starts)
    right = sum(int(programs.count_right(variables, batch)) for batch in batches)
    return right / (len(starts) * size)


def train(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    training: Data,
    held_out: Data,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Trains a classifier; prints and returns losses and the accuracy on held-out data.

    Args:
        model: module of ``(*inputs, disable_dropout)`` that returns logits.
        optimizer: optax's optimizer.
        training, held_out: the data.
        args: the command line.
    """
    started = time.perf_counter()
    chosen, size = recipe_of(args), args.batch_size
    if len(training.labels) < size or len(held_out.labels) < size:
        raise SystemExit(f"--batch-size must be at most {len(held_out.labels)}, got {size}")
    programs = compile_programs(model, optimizer, chosen)
    key, random = jax.random.key(args.seed), np.random.default_rng(args.seed)
    variables = programs.init(key, *training.take(np.arange(size)).inputs)
    moments = optimizer.init(variables["params"])
    label = f"fp8 {args.fp8_recipe}" if chosen is not None else str(jnp.dtype(compute_dtype()))
    losses: list[float] = []
    share = 0.0
    for epoch in range(args.epochs):
        values = []
        for batch in batches(training, size, random):
            if args.max_steps and len(losses) + len(values) >= args.max_steps:
                break
            key, dropout = jax.random.split(key)
            variables, moments, value = programs.step(variables, moments, batch, dropout)
            values.append(value)
        if not values:
            break
        losses += [float(value) for value in values]
        share = accuracy(programs, variables, held_out, size)
        print(
            f"{label}, epoch {epoch + 1}: loss {np.mean(losses[-len(values) :]):.4f}, held-out"
            f" accuracy {share:.4f}, {time.perf_counter() - started:.1f} s",
            flush=True,
        )
    result = {
        "run": label,
        "seed": args.seed,
        "steps": len(losses),
        "loss": float(np.mean(losses[-max(1, len(losses) // 10) :])),
        "accuracy": share,
        "seconds": time.perf_counter() - started,
        "device": str(jax.devices()[0].device_kind),
    }
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({**result, "losses": losses}, indent=1) + "\n")
    return result


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the checked command line."""
    args = parser.parse_args(argv)
    for name in ("epochs", "batch_size", "lr"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {getattr(args, name)}")
    return args
