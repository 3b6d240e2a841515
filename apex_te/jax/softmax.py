"""Softmax of attention scores as a function with Transformer Engine's arguments."""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp

from .ops.scaled_softmax import scaled_softmax

__all__ = ["SoftmaxFusionType", "softmax"]


class SoftmaxFusionType(enum.Enum):
    """Kinds of a softmax: it hides no scores, those of a mask, or those above the diagonal."""

    SCALED = "scaled"
    SCALED_MASKED = "scaled_masked"
    SCALED_UPPER_TRIANG_MASKED = "scaled_upper_triang_masked"


def softmax(
    logits: jax.Array, mask: jax.Array | None = None, scale_factor: float = 1.0,
    softmax_fusion_type: SoftmaxFusionType = SoftmaxFusionType.SCALED,
) -> jax.Array:  # fmt: skip
    """Computes softmax(scale_factor * logits) over the last dimension; differentiable.

    A row without visible scores gives zeros.

    Args:
        logits: [b, heads, sq, sk] float32, float16 or bfloat16.
        mask: bool or integer, True = masked out, [b or 1, heads or 1, sq, sk]; required with
            "SCALED_MASKED", ignored with the other types.
        softmax_fusion_type: a ``SoftmaxFusionType``.

    Raises:
        TypeError: ``softmax_fusion_type`` has another type.
        ValueError: ``mask`` is missing, or a shape does not match.
    """
    if not isinstance(softmax_fusion_type, SoftmaxFusionType):
        raise TypeError(
            "softmax: softmax_fusion_type must be a SoftmaxFusionType, got"
            f" {type(softmax_fusion_type).__name__}"
        )
    if softmax_fusion_type is SoftmaxFusionType.SCALED_UPPER_TRIANG_MASKED:
        return scaled_softmax(logits, scale_factor, causal="upper_left")
    if softmax_fusion_type is SoftmaxFusionType.SCALED:
        return scaled_softmax(logits, scale_factor)
    if mask is None:
        raise ValueError("softmax: mask must be given with SCALED_MASKED, got None")
    return scaled_softmax(logits, scale_factor, jnp.asarray(mask).astype(bool))
