"""Autograd functions of a norm and an activation in bf16 or fp32, which programs run again.

They compute what ``ops.rms_norm``, ``ops.layer_norm`` and the activations' ops compute, by the same
kernels, in less host time.
"""

from __future__ import annotations

from typing import Any

import torch

from ...ops.op_function import OpFunction, once_differentiable
from .context import take_saved
from .fused_casts import ActivationForward, NormForward, activation_gradient, norm_backward
from .gemm import as_matrix
from .layer_norm_linear_function import NormOptions
from .programs import Programs, repeatable


class PlainNormFunction(OpFunction):
    """LayerNorm or RMSNorm of ``inp``, or of ``inp + residual``; it then also returns the sum."""

    LABEL = "norm"

    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        options: NormOptions,
        programs: Programs,
    ) -> Any:
        key = (ctx.needs_input_grad, inp.dtype, inp.shape, options)
        tensors = (inp, residual, weight, bias)
        return programs.forward(ctx, _norm_forward, tensors, (options,), key)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple:
        return _norm_backward(ctx, *grads)


def _norm_forward(
    ctx: Any,
    inp: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: NormOptions,
) -> Any:
    rest = None if residual is None else as_matrix(residual)
    norm = NormForward(as_matrix(inp), weight, bias, *options[:3], rest)
    y = norm.plain().view(inp.shape)
    total = None if norm.residual_sum is None else norm.residual_sum.view(inp.shape)
    ctx.save_for_backward(inp if total is None else total, weight, norm.mean, norm.rstd)
    ctx.set_materialize_grads(False)
    ctx.zero_centered_gamma, ctx.has_residual = options.zero_centered_gamma, total is not None
    ctx.needs_norm = ctx.needs_input_grad[2:4]
    ctx.programs, ctx.device_type = None, inp.device.type
    return y if total is None else (y, total)


@repeatable
def _norm_backward(ctx: Any, dy: torch.Tensor | None, d_sum: Any = None) -> tuple:
    x, weight, mean, rstd = take_saved(ctx)
    if dy is None:
        return d_sum, d_sum, None, None, None, None
    rows = as_matrix(x)
    dx, d_gamma, d_beta = norm_backward(
        as_matrix(dy), rows, weight, mean, rstd, ctx.zero_centered_gamma,
        None if d_sum is None else d_sum.reshape(rows.shape), *ctx.needs_norm,
    )  # fmt: skip
    dx = dx.view(x.shape)
    return dx, dx if ctx.has_residual else None, d_gamma, d_beta, None, None


class PlainActivationFunction(OpFunction):
    """``fused_casts.activate(name, x)``: an activation of ``x`` [..., F], or [..., 2F] if gated."""

    LABEL = "activation"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, programs: Programs) -> Any:
        key = (ctx.needs_input_grad, x.dtype, x.shape, name)
        return programs.forward(ctx, _activation_forward, (x,), (name,), key)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Any) -> tuple:
        return _activation_backward(ctx, dy)


def _activation_forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
    y = ActivationForward(name, x).plain()
    ctx.save_for_backward(x)
    ctx.activation = name
    ctx.programs, ctx.device_type = None, x.device.type
    return y


@repeatable
def _activation_backward(ctx: Any, dy: torch.Tensor) -> tuple:
    (x,) = take_saved(ctx)
    return activation_gradient(ctx.activation, dy, x), None, None
