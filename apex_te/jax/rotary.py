"""Rotary position embedding of heads by their positions, with Transformer Engine's time scales."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .ops.rope import rope

# By name: the elements of a pair are neighbours.
GROUP_METHODS = {"consecutive": True, "alternate": False}


def rotary_pos_emb(
    x: jax.Array,
    windows: tuple[int, int] = (1, 10000),
    group_method: str = "consecutive",
    start: int | jax.Array = 0,
    positions: jax.Array | None = None,
) -> jax.Array:
    """Rotates each pair of a head's elements by an angle that grows with the position.

    The angle of pair i is position / (low * (high / low) ** (2 i / d)). Arithmetic is float32.

    Args:
        x: [b, s, h, d], d even; float32, float16 or bfloat16.
        windows: (low, high), the range of the pairs' time scales; i = 0 has low.
        group_method: "consecutive" for pairs (2 i, 2 i + 1), "alternate" for (i, i + d / 2).
        start: position of the first token.
        positions: [s], positions of all tokens, instead of ``start``.
    """
    if group_method not in GROUP_METHODS:
        raise ValueError(
            "rotary_pos_emb: group_method must be one of"
            f" {', '.join(GROUP_METHODS)}, got {group_method!r}"
        )
    size = x.shape[-1]
    if x.ndim != 4 or size % 2:
        raise ValueError(
            f"rotary_pos_emb: x must be [b, s, heads, size] of an even size, got {list(x.shape)}"
        )
    low, high = windows
    # All in float32, with 64-bit types enabled, too.
    scales = low * (high / low) ** (2 * jnp.arange(size // 2, dtype=jnp.float32) / size)
    if positions is None:
        positions = start + jnp.arange(x.shape[1])
    angles = positions.astype(jnp.float32)[:, None] / scales
    is_interleaved = GROUP_METHODS[group_method]
    return rope(x, angles, layout="bshd", interleaved=is_interleaved, rotary_dim=size)
