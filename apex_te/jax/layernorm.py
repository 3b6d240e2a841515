"""Layer or RMS norm as a function with Transformer Engine's arguments."""

from __future__ import annotations

import jax

from .fused_casts import Norm
from .ops.layer_norm import layer_norm
from .ops.rms_norm import rms_norm
from .quantize import refuse

__all__ = ["layernorm"]


def layernorm(
    x: jax.Array, gamma: jax.Array, beta: jax.Array | None, norm_type: str,
    zero_centered_gamma: bool = False, epsilon: float = 1e-6, quantizer: None = None,
) -> jax.Array:  # fmt: skip
    """Normalises over the last dimension, differentiably.

    Args:
        x: [..., in] float32, float16 or bfloat16.
        gamma, beta: [in]; ``beta`` is None with "rmsnorm".
        norm_type: "layernorm" or "rmsnorm".
        zero_centered_gamma: multiply by 1 + gamma instead of gamma.
        epsilon: added to the variance, or to the mean of squares.
        quantizer: must be None; ``layernorm_dense`` writes the result in FP8.

    Raises:
        ValueError: ``norm_type`` is unknown, or does not fit to ``beta``.
        NotImplementedError: ``quantizer`` is not None.
    """
    refuse("layernorm", quantizer=quantizer)
    norm = norm_of("layernorm", norm_type, epsilon, zero_centered_gamma, beta)
    return normalised(x, norm, *in_dtype(x, gamma, beta))


def norm_of(
    owner: str, norm_type: str, epsilon: float, zero_centered_gamma: bool, beta: jax.Array | None
) -> Norm:
    """Returns the norm that arguments name."""
    kind = str(norm_type).lower().strip().replace("-", "").replace("_", "")
    if kind not in ("layernorm", "rmsnorm"):
        raise ValueError(f'{owner}: norm_type must be "layernorm" or "rmsnorm", got {norm_type!r}')
    if (beta is None) != (kind == "rmsnorm"):
        wanted = "None" if kind == "rmsnorm" else "an array"
        got = "None" if beta is None else "an array"
        raise ValueError(f"{owner}: beta must be {wanted} with norm_type {kind!r}, got {got}")
    return Norm("rms_norm" if kind == "rmsnorm" else "layer_norm", epsilon, zero_centered_gamma)


def in_dtype(
    x: jax.Array, scale: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Returns a norm's parameters in float32, or in x's dtype if they have another."""
    made = [p if p is None or p.dtype == "float32" else p.astype(x.dtype) for p in (scale, bias)]
    return made[0], made[1]


def normalised(x: jax.Array, norm: Norm, scale: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Applies a norm, whose result has x's dtype."""
    if norm.op == "rms_norm":
        return rms_norm(x, scale, norm.epsilon, zero_centered_gamma=norm.zero_centered_gamma)
    assert bias is not None
    return layer_norm(x, scale, bias, norm.epsilon, zero_centered_gamma=norm.zero_centered_gamma)
