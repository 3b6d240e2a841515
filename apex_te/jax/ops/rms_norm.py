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
    """Normalises x / sqrt(mean(x^2) + eps) * gamma over the last dimension, differentiably.

    Statistics and arithmetic are float32.

    Args:
        x: [..., cols] float32, float16 or bfloat16.
        weight: [cols] in x's dtype or float32; None means gamma = 1.
        eps: added to the mean square.
        zero_centered_gamma: gamma is 1 + weight instead of weight.
        residual: array of x's shape and dtype, added to x before the norm. The sum is rounded to
            x's dtype before it is normalised, and is also returned.

    Returns:
        y in x's shape and dtype; with a residual (y, x + residual).

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match.
    """
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
    """Computes ``rms_norm`` of a matrix, and the rstd that ``rms_norm_bwd`` needs.

    Args:
        x: [rows, cols] float32, float16 or bfloat16.
        weight: [cols] in x's dtype or float32; None means gamma = 1.
        eps, zero_centered_gamma, residual: as in ``rms_norm``.

    Returns:
        y [rows, cols]; rstd, float32 [rows]; and x + residual if a residual is given.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match.
    """
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
    """Computes ``rms_norm_fwd`` and quantizes its float32 y: q = saturating_cast(y * scale).

    Args:
        x: [rows, cols] float32, float16 or bfloat16.
        weight: [cols] in x's dtype or float32; None means gamma = 1.
        eps, zero_centered_gamma, residual: as in ``rms_norm``.
        scale: one float32 element.
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        rowwise, columnwise: the copies to make: [rows, cols], and its transpose [cols, rows].
        amax: one float32 element; the result's ``amax`` is then max(amax, max |y|), before scaling,
            where NaN counts as largest. None computes no amax.

    Returns:
        FP8 copies of y; rstd, float32 [rows]; and x + residual if a residual is given.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match.
    """
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
    """Computes the gradients of ``rms_norm_fwd``, deterministically.

    Args:
        dy: [rows, cols] in x's dtype, gradient of y.
        x: [rows, cols], the matrix that was normalised: the forward's x, or x + residual with a
            residual.
        weight: as passed to the forward.
        rstd: float32 [rows], from ``rms_norm_fwd``.
        zero_centered_gamma: gamma is 1 + weight instead of weight.
        d_residual: [rows, cols], gradient of the returned residual sum; added to dx. None adds
            nothing.
        with_dweight: compute the gradient of the weight.

    Returns:
        dx [rows, cols] and dweight [cols] or None; dbias is None.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match.
    """
    return _norm.norm_bwd(
        "rms_norm", dy, x, weight, None, {"rstd": rstd}, zero_centered_gamma, d_residual,
        with_dweight,
    )  # fmt: skip
