"""Updates delayed scaling: appends staged amax values to the histories and computes new scales."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from ...runtime.op_options import is_most_recent
from .._call import call
from ._checked import checked

__all__ = ["MOST_HISTORIES", "amax_scale_update"]

# XLA takes long to compile a call with more tensors that are updated in place.
MOST_HISTORIES = 64


@checked
def amax_scale_update(
    histories: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    scale_invs: Sequence[jax.Array],
    fp8_max: Sequence[float],
    *,
    margin: int = 0,
    algo: str = "max",
    pow2: bool = False,
) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
    """Returns every history, scale and scale_inv after one update of delayed scaling.

    A slot (column) belongs to one quantized array. Row 0 of a history holds the amax values
    recorded since the last update; row 1 is the oldest amax, the last row the newest. An amax of 0,
    infinity or NaN only sets row 0 to 0. Any other amax also becomes the last row, after the oldest
    has dropped out, and gives the slot scale = fp8_max * 2**-margin / amax and scale_inv = 1 /
    scale. ``jax.vmap`` updates all elements of the batch in the same call.

    Args:
        histories: float32 [length, slots] each.
        scales, scale_invs: float32 [slots], one array for each history.
        fp8_max: the largest value of the format for each history, 448 (E4M3) or 57344 (E5M2).
        margin: exponent of a power of two that scales are divided by, as headroom.
        algo: "max" computes scales from the maximum of the recorded amax and the history,
            "most_recent" from the recorded amax.
        pow2: round scales down to powers of two.

    Returns:
        (histories, scales, scale_invs), lists of new arrays.

    Raises:
        ValueError: a list length does not match, or ``algo`` is not listed.
        jax.errors.JaxRuntimeError: a shape or dtype does not match; raised when the program runs.
    """
    most_recent = is_most_recent("amax_scale_update", algo)
    for name, given in (("scales", scales), ("scale_invs", scale_invs), ("fp8_max", fp8_max)):
        if len(given) != len(histories):
            raise ValueError(
                f"amax_scale_update: {name} must have {len(histories)} entries, got {len(given)}"
            )
    options = {"margin": margin, "most_recent": most_recent, "pow2": bool(pow2)}
    out: tuple[list[jax.Array], list[jax.Array], list[jax.Array]] = ([], [], [])
    for first in range(0, len(histories), MOST_HISTORIES):
        part = slice(first, first + MOST_HISTORIES)
        update = _update(tuple(float(v) for v in fp8_max[part]), tuple(options.items()))
        made = update(list(histories[part]), list(scales[part]), list(scale_invs[part]))
        for into, arrays in zip(out, made, strict=True):
            into.extend(arrays)
    return out


@functools.lru_cache(maxsize=256)
def _update(fp8_max: tuple[float, ...], options: tuple[tuple[str, Any], ...]) -> Any:
    """Returns the call as a function of histories, scales and scale_invs, which can be mapped."""

    @custom_vmap
    def update(histories: Any, scales: Any, scale_invs: Any) -> Any:
        made = call(
            "amax_scale_update", "amax_scale_update", histories=histories, scales=scales,
            scale_invs=scale_invs, fp8_max=fp8_max, **dict(options),
        )  # fmt: skip
        return made["histories"], made["scales"], made["scale_invs"]

    @update.def_vmap
    def _mapped(size: int, batched: Any, *lists: Any) -> tuple[Any, Any]:
        """Updates slots of all elements side by side, as they do not depend on each other."""

        def fold(x: jax.Array, is_batched: bool) -> jax.Array:
            x = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
            return jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], size * x.shape[-1])

        def unfold(x: jax.Array) -> jax.Array:
            return jnp.moveaxis(x.reshape(*x.shape[:-1], size, x.shape[-1] // size), -2, 0)

        made = jax.tree.map(unfold, update(*jax.tree.map(fold, list(lists), list(batched))))
        return made, jax.tree.map(lambda _: True, made)

    return update
