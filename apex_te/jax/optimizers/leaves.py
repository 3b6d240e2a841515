"""Leaves of parameter trees: master weights, groups that one call updates, and checked options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..ops._checks import FLOATS


def with_dtypes(name: str, params: Any) -> Any:
    """Returns ``params`` after checking that all are float32, float16 or bfloat16."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or jnp.dtype(dtype).name not in FLOATS:
            found = type(leaf).__name__ if dtype is None else dtype
            raise TypeError(
                f"{name}: params{jax.tree_util.keystr(path)} must have dtype float32, float16 or"
                f" bfloat16, got {found}"
            )
    return params


def zeros_of(params: Any) -> Any:
    """Returns a tree of float32 zeros of the parameters' shapes and shardings."""
    return jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)


def master_weights_of(params: Any, wanted: bool) -> Any:
    """Returns a tree of float32 copies of the 16-bit parameters; other leaves are None.

    All leaves are None if ``wanted`` is False.
    """

    def copy(p: jax.Array) -> jax.Array | None:
        return p.astype(jnp.float32) if wanted and p.dtype != jnp.float32 else None

    return jax.tree.map(copy, params)


def number(name: str, option: str, value: Any, below: float | None = None) -> float:
    """Returns an option as a float, which must be at least 0 and, if given, below ``below``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(
            f"{name}: {option} must be a number, static_args of optax.inject_hyperparams, got"
            f" {type(value).__name__}"
        )
    if not value >= 0.0 or (below is not None and not value < below):
        limit = "" if below is None else f" and below {below:g}"
        raise ValueError(f"{name}: {option} must be at least 0{limit}, got {value}")
    return float(value)


def rate_at(name: str, learning_rate: Any, count: jax.Array) -> Any:
    """Returns the learning rate after ``count`` steps: a number, or a float32 array [1]."""
    rate = learning_rate(count) if callable(learning_rate) else learning_rate
    if isinstance(rate, (int, float)):
        return number(name, "learning_rate", rate)
    return jnp.asarray(rate, jnp.float32).reshape(1)


def next_count(count: jax.Array, found_inf: jax.Array | None) -> jax.Array:
    """Returns ``count`` + 1, or ``count`` if ``found_inf`` is given and skips the step."""
    if found_inf is None:
        return count + 1
    return count + (found_inf.reshape(count.shape) == 0).astype(count.dtype)


def updated(
    params: Any,
    grads: Any,
    moments: Mapping[str, Any],
    masters: Any,
    decays: Any,
    step: Callable[..., Any],
) -> dict[str, Any]:
    """Steps all leaves, in one call for leaves that agree in master weight and weight decay.

    Returns the new trees by name: "params", "masters" and those of ``moments``. ``decays`` is the
    option ``mask`` of ``fused_adam``; ``step`` takes lists of parameters, gradients and moments,
    with ``masters`` and ``decays`` by name.
    """
    tree = jax.tree.structure(params)
    mask = decays(params) if callable(decays) else True if decays is None else decays
    flags = jax.tree.leaves(
        jax.tree.map(lambda flag, part: jax.tree.map(lambda _: flag, part), mask, params)
    )
    columns = {"params": jax.tree.leaves(params), "grads": tree.flatten_up_to(grads)}
    columns |= {name: tree.flatten_up_to(each) for name, each in moments.items()}
    columns["masters"] = tree.flatten_up_to(masters)
    made = {name: list(leaves) for name, leaves in columns.items() if name != "grads"}
    for (has_master, flag), places in _groups(columns["masters"], flags).items():
        part = {name: [leaves[i] for i in places] for name, leaves in columns.items()}
        masters_of_part = part.pop("masters")
        found = step(*part.values(), masters=masters_of_part if has_master else None, decays=flag)
        for name in made:
            for i, leaf in zip(places, getattr(found, name), strict=False):
                made[name][i] = leaf
    return {name: tree.unflatten(leaves) for name, leaves in made.items()}


def _groups(masters: Sequence[Any], flags: Sequence[Any]) -> dict[tuple[bool, bool], list[int]]:
    """Returns the numbers of the leaves that one call updates, by what they have in common."""
    found: dict[tuple[bool, bool], list[int]] = {}
    for i, (master, flag) in enumerate(zip(masters, flags, strict=True)):
        found.setdefault((master is not None, bool(flag)), []).append(i)
    return found
