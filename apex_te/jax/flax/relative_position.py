"""T5's relative position biases as a Flax Linen module."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from ..places import Axes
from .module import Initializer, TransformerEngineBase

__all__ = ["RelativePositionBiases"]


def _buckets(
    q_seqlen: int, k_seqlen: int, bidirectional: bool, num_buckets: int, max_distance: int
) -> np.ndarray:
    """Returns the bucket of each pair of a query and a key, int32 [q_seqlen, k_seqlen].

    Half of the buckets are for single distances, the others grow with the distance's logarithm.
    """
    distance = np.arange(q_seqlen)[:, None] - np.arange(k_seqlen)
    first = np.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        first = (distance < 0) * num_buckets
        distance = np.abs(distance)
    distance = np.maximum(distance, 0)
    exact = num_buckets // 2
    # The epsilon keeps a distance at the edge of a bucket from falling short by its rounding.
    ratio = distance.astype(np.float32) / exact + np.finfo(np.float32).eps
    steps = np.log(ratio) / np.log(max_distance / exact) * (num_buckets - exact)
    far = np.minimum(exact + steps.astype(np.int32), num_buckets - 1)
    return (first + np.where(distance < exact, distance, far)).astype(np.int32)


class RelativePositionBiases(TransformerEngineBase):
    """Biases of attention scores, learned per head and per bucket of the query-key distance.

    Attributes:
        num_buckets: number of buckets into which distances fall.
        max_distance: all distances from this one on fall into the last bucket.
        num_attention_heads: number of heads.
        embedding_init: initializer of ``rel_embedding`` [heads, buckets].
        embedding_axes: logical axes of ``rel_embedding``.
        dtype: dtype of the parameter and of the result.
    """

    num_buckets: int
    max_distance: int
    num_attention_heads: int
    embedding_init: Initializer = nn.linear.default_embed_init
    embedding_axes: Axes = ("heads", "relpos_buckets")
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, q_seqlen: int, k_seqlen: int, bidirectional: bool = True) -> jax.Array:
        """Returns biases [1, heads, q_seqlen, k_seqlen].

        Args:
            q_seqlen, k_seqlen: numbers of queries and keys.
            bidirectional: use half of the buckets for keys after the query. Otherwise all of
                these keys share the bucket of distance 0.
        """
        self._check_counts("num_buckets", "num_attention_heads")
        if self.num_buckets < (4 if bidirectional else 2):
            raise ValueError(
                "RelativePositionBiases: num_buckets must be at least"
                f" {4 if bidirectional else 2}, got {self.num_buckets}"
            )
        if self.max_distance <= self.num_buckets // (4 if bidirectional else 2):
            raise ValueError(
                "RelativePositionBiases: max_distance must be above the distances with buckets of"
                f" their own, got {self.max_distance}"
            )
        shape = (self.num_attention_heads, self.num_buckets)
        table = self._parameter("rel_embedding", self.embedding_init, shape, self.embedding_axes)
        found = _buckets(q_seqlen, k_seqlen, bidirectional, self.num_buckets, self.max_distance)
        # A GEMM, whose gradient is the same in every run, not a gather with added gradients.
        chosen = jax.nn.one_hot(jnp.asarray(found), self.num_buckets, axis=0, dtype=jnp.float32)
        biases = jnp.einsum("hn,nqk->hqk", table, chosen, precision=jax.lax.Precision.HIGHEST)
        return biases[None].astype(self._dtype())
