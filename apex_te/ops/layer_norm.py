"""Layer normalisation over the last dimension, also with a residual and a fused cast to FP8."""

from __future__ import annotations

from typing import Any

import torch

from . import norm_common
from .binding import OpFunction, bind, checked, note_written, once_differentiable
from .fp8_output import FP8Output
from .norm_common import NormFP8Output, NormGradients, NormOutput

_fwd = bind("layer_norm", "layer_norm_fwd")
_fwd_fp8 = bind("layer_norm", "layer_norm_fwd_fp8")
_again = bind("layer_norm", "layer_norm_again")
_again_fp8 = bind("layer_norm", "layer_norm_again_fp8")
_bwd = bind("layer_norm", "layer_norm_bwd")


@checked
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Normalises (x - mean) / sqrt(variance + eps) * gamma + bias over the last dimension.

    It is differentiable. Statistics and arithmetic are float32; the variance is computed
    from x - mean. A row with a NaN or an infinity becomes NaN.

    Args:
        x: [..., cols] float32, float16 or bfloat16; made contiguous if it is not.
        weight: [cols] in x's dtype or float32; None means gamma = 1.
        bias: [cols] in the weight's dtype, without a weight in x's dtype or float32; None stands
            for zeros.
        eps: added to the variance.
        zero_centered_gamma: gamma is 1 + weight instead of weight.
        residual: tensor of x's shape and dtype, added to x before the norm. The sum is rounded to
            x's dtype before it is normalised, and is also returned.

    Returns:
        y in x's shape and dtype; with a residual (y, x + residual).

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match.
    """
    if residual is None:
        return _LayerNorm.apply(x, weight, bias, eps, zero_centered_gamma)
    return _LayerNormResidual.apply(x, weight, bias, residual, eps, zero_centered_gamma)


@checked
def layer_norm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *,
    zero_centered_gamma: bool = False,
    residual: torch.Tensor | None = None,
) -> NormOutput:
    """Computes ``layer_norm`` of a matrix without autograd.

    Args:
        x: [rows, cols] float32, float16 or bfloat16; made contiguous if it is not.
        weight, bias: [cols] in x's dtype or float32; None stands for gamma = 1 and for zeros.
        eps, zero_centered_gamma, residual: as in ``layer_norm``.

    Returns:
        y [rows, cols]; mean and rstd, float32 [rows], which ``layer_norm_bwd`` needs; and x +
        residual if a residual is given.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match.
    """
    x = x.contiguous()
    out = NormOutput(
        torch.empty_like(x),
        norm_common.statistic(x),
        norm_common.statistic(x),
        None if residual is None else torch.empty_like(x),
    )
    weight, bias = norm_common.contiguous(weight), norm_common.contiguous(bias)
    residual = norm_common.contiguous(residual)
    _fwd(
        x, weight, bias, residual, out.y, out.residual_sum, out.mean, out.rstd, eps,
        zero_centered_gamma,
    )  # fmt: skip
    return out


@checked
def layer_norm_fwd_fp8(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    scale: torch.Tensor,
    fp8_dtype: torch.dtype,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    pad_columnwise: bool = False,
    amax: torch.Tensor | None = None,
    scale_inv: torch.Tensor | None = None,
    zero_centered_gamma: bool = False,
    residual: torch.Tensor | None = None,
) -> NormFP8Output:
    """Computes ``layer_norm_fwd`` and quantizes its float32 y: q = saturating_cast(y * scale).

    Args:
        x: [rows, cols] float32, float16 or bfloat16.
        weight, bias: [cols] in x's dtype or float32; None stands for gamma = 1 and for zeros.
        eps, zero_centered_gamma, residual: as in ``layer_norm``.
        scale: one float32 element on x's device.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise: make the rowwise copy, [rows, cols].
        columnwise: make the columnwise copy, the transpose [cols, rows].
        pad_columnwise: pad the columnwise copy to [cols, rows rounded up to 16]; the added columns
            are zeros.
        amax: one float32 element, becomes max(amax, max |y|), before scaling; NaN counts as
            largest. None computes no amax.
        scale_inv: one float32 element to receive 1 / scale; a new one unless given.

    Returns:
        FP8 copies of y; mean and rstd, float32 [rows]; and x + residual if a residual is given.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match.
    """
    x = x.contiguous()
    y = norm_common.allocate_fp8(
        "layer_norm", x, fp8_dtype, rowwise, columnwise, scale_inv, pad_columnwise
    )
    mean, rstd = norm_common.statistic(x), norm_common.statistic(x)
    total = None if residual is None else torch.empty_like(x)
    weight, bias = norm_common.contiguous(weight), norm_common.contiguous(bias)
    residual = norm_common.contiguous(residual)
    _fwd_fp8(
        x, weight, bias, residual, scale, y.rowwise, y.columnwise, amax, y.scale_inv, total, mean,
        rstd, eps, zero_centered_gamma,
    )  # fmt: skip
    note_written(amax, scale_inv)
    return NormFP8Output(y, mean, rstd, total)


@checked
def layer_norm_again(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    *,
    zero_centered_gamma: bool = False,
) -> torch.Tensor:
    """Recomputes y of an earlier ``layer_norm_fwd`` from its statistics, bitwise identical.

    Args:
        x: [rows, cols] float32, float16 or bfloat16, the matrix that was normalised: the forward's
            x, or x + residual with a residual.
        weight, bias: [cols] in x's dtype or float32, or None, as in the forward.
        mean, rstd: [rows] float32, from ``layer_norm_fwd``.
        zero_centered_gamma: gamma is 1 + weight instead of weight.

    Returns:
        y [rows, cols] in x's dtype.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match.
    """
    x = x.contiguous()
    weight, bias = norm_common.contiguous(weight), norm_common.contiguous(bias)
    y = torch.empty_like(x)
    _again(x, weight, bias, y, mean, rstd, zero_centered_gamma)
    return y


@checked
def layer_norm_again_fp8(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    scale: torch.Tensor,
    fp8_dtype: torch.dtype,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    pad_columnwise: bool = False,
    amax: torch.Tensor | None = None,
    zero_centered_gamma: bool = False,
) -> FP8Output:
    """Recomputes y of an earlier ``layer_norm_fwd_fp8`` from its statistics, bitwise identical.

    Args:
        x: [rows, cols] float32, float16 or bfloat16, the matrix that was normalised: the forward's
            x, or x + residual with a residual.
        weight, bias: [cols] in x's dtype or float32, or None, as in the forward.
        mean, rstd: [rows] float32, from the forward.
        scale: one float32 element on x's device.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise: make the rowwise copy, [rows, cols].
        columnwise: make the columnwise copy, the transpose [cols, rows].
        pad_columnwise: pad the columnwise copy to [cols, rows rounded up to 16]; the added columns
            are zeros.
        amax: one float32 element, becomes max(amax, max |y|), before scaling; NaN counts as
            largest. None computes no amax.
        zero_centered_gamma: gamma is 1 + weight instead of weight.

    Returns:
        FP8 copies of y, [rows, cols].

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match.
    """
    x = x.contiguous()
    y = norm_common.allocate_fp8(
        "layer_norm", x, fp8_dtype, rowwise, columnwise, None, pad_columnwise
    )
    weight, bias = norm_common.contiguous(weight), norm_common.contiguous(bias)
    _again_fp8(
        x, weight, bias, scale, y.rowwise, y.columnwise, amax, y.scale_inv, mean, rstd,
        zero_centered_gamma,
    )  # fmt: skip
    note_written(amax)
    return y


@checked
def layer_norm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    *,
    zero_centered_gamma: bool = False,
    d_residual: torch.Tensor | None = None,
    with_dweight: bool = True,
    with_dbias: bool = True,
) -> NormGradients:
    """Computes the gradients of ``layer_norm_fwd``, deterministically.

    Args:
        dy: [rows, cols] in x's dtype, gradient of y.
        x: [rows, cols] float32, float16 or bfloat16, the matrix that was normalised: the forward's
            x, or x + residual with a residual.
        weight: [cols] in x's dtype or float32, or None, as in the forward.
        mean, rstd: [rows] float32, from ``layer_norm_fwd``.
        zero_centered_gamma: gamma is 1 + weight instead of weight.
        d_residual: [rows, cols] in x's dtype, gradient of the returned residual sum; added to dx.
            None adds nothing.
        with_dweight: compute the weight's gradient, in the weight's dtype (x's if weight is None).
        with_dbias: compute the bias's gradient, in the same dtype as the weight's.

    Returns:
        The gradient of x, [rows, cols] in its dtype, and the requested ones of weight and bias,
        [cols].

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match.
    """
    dy, x, weight = dy.contiguous(), x.contiguous(), norm_common.contiguous(weight)
    like = x if weight is None else weight
    dx = torch.empty_like(x)
    dweight = like.new_empty(x.shape[1]) if with_dweight else None
    dbias = like.new_empty(x.shape[1]) if with_dbias else None
    workspace = norm_common.bwd_workspace(x, 2) if with_dweight or with_dbias else None
    d_residual = norm_common.contiguous(d_residual)
    _bwd(dy, x, weight, mean, rstd, d_residual, dx, dweight, dbias, workspace, zero_centered_gamma)
    return NormGradients(dx, dweight, dbias)


def _backward(ctx: Any, dy: torch.Tensor, d_residual: torch.Tensor | None) -> NormGradients:
    x, weight, mean, rstd = ctx.saved_tensors
    rows = norm_common.as_rows("layer_norm", "dy", dy)
    other = None if d_residual is None else d_residual.reshape(rows.shape)
    grads = layer_norm_bwd(
        rows, x, weight, mean, rstd,
        zero_centered_gamma=ctx.zero_centered_gamma, d_residual=other,
        with_dweight=ctx.needs_input_grad[1], with_dbias=ctx.needs_input_grad[2],
    )  # fmt: skip
    return grads._replace(dx=grads.dx.view(dy.shape))


class _LayerNorm(OpFunction):
    LABEL = "layer_norm"

    @staticmethod
    def forward(ctx, x, weight, bias, eps, zero_centered_gamma):
        rows = norm_common.as_rows("layer_norm", "x", x)
        out = layer_norm_fwd(rows, weight, bias, eps, zero_centered_gamma=zero_centered_gamma)
        ctx.save_for_backward(rows, weight, out.mean, out.rstd)
        ctx.zero_centered_gamma = zero_centered_gamma
        return torch.ops.aten._unsafe_view(out.y, x.shape)  # callers may write to it

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return *_backward(ctx, dy, None), None, None


class _LayerNormResidual(OpFunction):
    LABEL = "layer_norm"

    @staticmethod
    def forward(ctx, x, weight, bias, residual, eps, zero_centered_gamma):
        rows = norm_common.as_rows("layer_norm", "x", x)
        out = layer_norm_fwd(
            rows, weight, bias, eps, zero_centered_gamma=zero_centered_gamma,
            residual=norm_common.as_rows("layer_norm", "residual", residual, like=x),
        )  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out.residual_sum, weight, out.mean, out.rstd)
        ctx.zero_centered_gamma = zero_centered_gamma
        return tuple(t.view(x.shape) for t in (out.y, out.residual_sum) if t is not None)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, d_sum):
        if dy is None:
            return d_sum, None, None, d_sum, None, None
        dx, dweight, dbias = _backward(ctx, dy, d_sum)
        return dx, dweight, dbias, dx, None, None


def reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *,
    zero_centered_gamma: bool = False,
    residual: torch.Tensor | None = None,
) -> NormOutput:
    """Computes ``layer_norm_fwd`` in plain PyTorch, as a differentiable specification.

    x and ``residual`` are [..., cols] in one floating-point dtype, ``weight`` and ``bias`` [cols]
    or None. Arithmetic is float32, or float64 for float64.
    """
    return norm_common.reference(
        x, weight, bias, eps, centre=True, zero_centered_gamma=zero_centered_gamma,
        residual=residual,
    )  # fmt: skip
