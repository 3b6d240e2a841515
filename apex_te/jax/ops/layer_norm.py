"""Layer normalisation over the last dimension, also with a residual and a fused cast to FP8."""

from __future__ import annotations

from typing import Any

import jax

from . import _norm
from ._checked import checked
from ._norm import NormFP8Output, NormGradients, NormOutput
from .fp8_output import FP8Output

__all__ = ["layer_norm", "layer_norm_bwd", "layer_norm_fwd", "layer_norm_fwd_fp8"]


@checked
def layer_norm(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None = None,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    residual: jax.Array | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Normalises (x - mean) / sqrt(variance + eps) * gamma + bias, differentiably."""
    norm = _norm.differentiable("layer_norm", float(eps), zero_centered_gamma, residual is not None)
    y, total = norm(x, weight, bias, residual)
    return y if total is None else (y, total)


@checked
def layer_norm_fwd(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    eps: float,
    *,
    zero_centered_gamma: bool = False,
    residual: jax.Array | None = None,
) -> NormOutput:
    """Computes ``layer_norm`` of a matrix [rows, cols], and the statistics for backward."""
    made = _norm.norm_fwd("layer_norm", x, weight, bias, eps, zero_centered_gamma, residual)
    return NormOutput(made["y"], made["mean"], made["rstd"], made.get("residual_sum"))


@checked
def layer_norm_fwd_fp8(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    eps: float,
    scale: jax.Array,
    fp8_dtype: Any,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    amax: jax.Array | None = None,
    zero_centered_gamma: bool = False,
    residual: jax.Array | None = None,
) -> NormFP8Output:
    """Quantizes the float32 result y of ``layer_norm_fwd``: q = saturating_cast(y * scale)."""
    fp8 = (scale, fp8_dtype, rowwise, columnwise, amax)
    made = _norm.norm_fwd("layer_norm", x, weight, bias, eps, zero_centered_gamma, residual, fp8)
    y = FP8Output(*(made.get(name) for name in FP8Output._fields))
    return NormFP8Output(y, made["mean"], made["rstd"], made.get("residual_sum"))


@checked
def layer_norm_bwd(
    dy: jax.Array,
    x: jax.Array,
    weight: jax.Array | None,
    mean: jax.Array,
    rstd: jax.Array,
    *,
    zero_centered_gamma: bool = False,
    d_residual: jax.Array | None = None,
    with_dweight: bool = True,
    with_dbias: bool = True,
) -> NormGradients:
    """Computes the gradients of ``layer_norm_fwd``, deterministically."""
    return _norm.norm_bwd(
        "layer_norm", dy, x, weight, None, {"mean": mean, "rstd": rstd}, zero_centered_gamma,
        d_residual, with_dweight, with_dbias,
    )  # fmt: skip
