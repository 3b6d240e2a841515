"""Low-rank adaptation of a linear layer: what is added to its result."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def adapted(x: jax.Array, a: jax.Array, b: jax.Array, inner: int, alpha: float | None) -> jax.Array:
    """Computes x @ a @ b * alpha / rank in x's dtype; None multiplies by 1.

    ``x`` is [..., in...] with ``inner`` dimensions "in", ``a`` [in..., lead..., rank] and ``b``
    [lead..., rank, last]; the result is [..., lead..., last].
    """
    rank, a, b = b.shape[-2], a.astype(x.dtype), b.astype(x.dtype)
    whole = (*x.shape[: x.ndim - inner], *b.shape[:-2], b.shape[-1])
    x = x.reshape(*x.shape[: x.ndim - inner], -1)
    h = jnp.einsum("...i,inr->...nr", x, a.reshape(x.shape[-1], -1, rank))
    y = jnp.einsum("...nr,nrl->...nl", h, b.reshape(-1, rank, b.shape[-1]))
    return y.reshape(whole) * (1.0 if alpha is None else alpha / rank)
