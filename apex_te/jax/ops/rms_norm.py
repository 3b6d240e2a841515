"""RMS normalisation over the last dimension, also with a residual and a fused cast to FP8."""

from __future__ import annotations

from typing import Any

import jax

from . import _norm
from ._checked import checked
from ._norm import NormFP8Output, NormGradients, NormOutput
from .fp8_output import FP8Output

__all__ = ["rms_norm", "rms_norm_bwd", "rms_norm_fwd", "rms_norm_fwd_fp8"]


@checked
def rms_norm(
    x: jax.Array,
    weight: jax.Array | None,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    residual: jax.Array | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Normalises x / sqrt(mean(x^2) + eps) * gamma over the last dimension, differentiably."""
    norm = _norm.differentiable("rms_norm", float(eps), zero_centered_gamma, residual is not None)
    y, total = norm(x, weight, None, residual)
    return y if total is None else (y, total)


@checked
def rms_norm_fwd(
    x: jax.Array,
    weight: jax.Array | None,
    eps: float,
    *,
    zero_centered_gamma: bool = False,
    residual: jax.Array | None = None,
) -> NormOutput:
    """Computes ``rms_norm`` of a matrix [rows, cols], and the rstd that ``rms_norm_bwd`` needs."""
    made = _norm.norm_fwd("rms_norm", x, weight, None, eps, zero_centered_gamma, residual)
    return NormOutput(made["y"], None, made["rstd"], made.get("residual_sum"))


@checked
def rms_norm_fwd_fp8(
    x: jax.Array,
    weight: jax.Array | None,
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
    """Quantizes the float32 result y of ``rms_norm_fwd``: q = saturating_cast(y * scale)."""
    fp8 = (scale, fp8_dtype, rowwise, columnwise, amax)
    made = _norm.norm_fwd("rms_norm", x, weight, None, eps, zero_centered_gamma, residual, fp8)
    y = FP8Output(*(made.get(name) for name in FP8Output._fields))
    return NormFP8Output(y, None, made["rstd"], made.get("residual_sum"))


@checked
def rms_norm_bwd(
    dy: jax.Array,
    x: jax.Array,
    weight: jax.Array | None,
    rstd: jax.Array,
    *,
    zero_centered_gamma: bool = False,
    d_residual: jax.Array | None = None,
    with_dweight: bool = True,
) -> NormGradients:
    """Computes the gradients of ``rms_norm_fwd``, deterministically."""
    return _norm.norm_bwd(
        "rms_norm", dy, x, weight, None, {"rstd": rstd}, zero_centered_gamma, d_residual,
        with_dweight,
    )  # fmt: skip
