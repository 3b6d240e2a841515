"""First scales from the first tensors, with ``DelayedScaling(first_step="current")``.

The state of a module then has the leaf ``first_due``, a 1 for each slot whose scale has not been
set yet: the slots of forward of all GEMMs, then those of backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..recipe import DelayedScaling
from ._partition import same_on_all
from .ops._rows import rowwise
from .ops.amax_scale_update import amax_scale_update

FIRST_DUE = "first_due"
# Slots of each GEMM's three tensors in forward and two in backward, as on PyTorch's side.
SLOTS = {"fwd": 3, "bwd": 2}


def initial(recipe: DelayedScaling, gemms: int) -> dict[str, jax.Array]:
    """Returns ``first_due`` of ``gemms`` GEMMs by name, if ``first_step`` is "current", else {}."""
    if recipe.first_step != "current":
        return {}
    return {FIRST_DUE: jnp.ones(sum(SLOTS.values()) * gemms, jnp.float32)}


def numbers_of_gemm(leaf: Any, gemm: int) -> list[int]:
    """Returns the indices of one GEMM's slots in a module's ``first_due``."""
    forward = SLOTS["fwd"] * (leaf.shape[-1] // sum(SLOTS.values()))
    first = {"fwd": SLOTS["fwd"] * gemm, "bwd": forward + SLOTS["bwd"] * gemm}
    return [number for way in SLOTS for number in range(first[way], first[way] + SLOTS[way])]


def of_slots(of_gemms: jax.Array) -> jax.Array:
    """Returns a value for each slot of ``first_due``, repeated from one for each GEMM."""
    return jnp.concatenate([jnp.repeat(of_gemms, n, axis=-1) for n in SLOTS.values()], axis=-1)


def with_first_scale(
    state: Mapping[str, Any] | None, way: str, slot: int, x: jax.Array, recipe: Any
) -> Any:
    """Returns a GEMM's state; a slot without a scale gets one from the amax of ``x``."""
    if state is None or FIRST_DUE not in state or not x.size:
        return state
    limits = recipe.fp8_format.value
    names = f"scale_{way}", f"scale_inv_{way}"
    before = [state[name][slot : slot + 1] for name in names]
    # A history of one row is this tensor alone: the same formula and guards as an update.
    _, (scale,), (scale_inv,) = amax_scale_update(
        [_amax(x, before[0]).reshape(1, 1)], [before[0]], [before[1]],
        [limits.max_fwd if way == "fwd" else limits.max_bwd], margin=recipe.margin,
        algo=recipe.amax_compute_algo, pow2=recipe.scaling_factor_compute_algo == "pow2",
    )  # fmt: skip
    number = slot if way == "fwd" else SLOTS["fwd"] + slot
    due = state[FIRST_DUE][number] > 0
    moved = {
        name: state[name].at[slot].set(jnp.where(due, new, old)[0])
        for name, new, old in zip(names, (scale, scale_inv), before, strict=True)
    }
    return {**state, **moved, FIRST_DUE: state[FIRST_DUE].at[number].set(0.0)}


def _amax(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns max |x| in float32, NaN above infinity; XLA would flush a subnormal one to zero."""

    def body(x: jax.Array) -> tuple[jax.Array]:
        bits = 8 * x.dtype.itemsize
        integers = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}"))
        largest = (integers & ((1 << (bits - 1)) - 1)).max(keepdims=True)
        return (jax.lax.bitcast_convert_type(largest, x.dtype).astype(jnp.float32),)

    (amax,) = rowwise("amax", "x: r -> amax: ^", body, ranks={"r": x.ndim})(x)
    return same_on_all(scale, amax)
