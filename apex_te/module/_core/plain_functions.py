"""Autograd functions in bf16 or fp32: a norm and an activation, run by programs, and a GEMM.

The first two compute what ``ops.rms_norm``, ``ops.layer_norm`` and the activations' ops compute, by
the same kernels, in less host time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from ...comm.collectives import Pending
from ...fp8.parameter.operands import dequantized
from ...ops.binding import OpFunction, once_differentiable
from ...ops.gemm_common import product_into
from ...ops.row_products import row_product
from . import gemm as _gemm
from .fused_casts import (
    ActivationForward,
    NormForward,
    NormOptions,
    activation_gradient,
    norm_backward,
)
from .gemm import GemmOptions, as_matrix, plain_weight_gradient
from .programs import Programs, repeatable, take_saved, without_autocast
from .tensor_parallel import TensorParallel


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


class HighPrecisionLinearFunction(OpFunction):
    """``inp @ weight.T + bias`` in ``out_dtype`` with collectives, and wgrad by ``GemmOptions``."""

    LABEL = "Linear"

    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        options: GemmOptions,
    ) -> torch.Tensor:
        need_input, need_weight, _ = ctx.needs_input_grad[:3]
        parallel = options.parallel
        x, w = inp.to(out_dtype), weight.to(out_dtype)
        ctx.save_for_backward(x if need_weight else None, w if need_input else None)
        ctx.needs = ctx.needs_input_grad[:3]
        ctx.dtypes = (inp.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.input_shape = inp.shape
        ctx.options = options
        ctx.parameter = weight if need_weight else None
        ctx.device_type = inp.device.type
        bias = None if bias is None else bias.to(out_dtype)
        if parallel is None:
            if options.independent_rows:
                return row_product(x, dequantized(w), bias)
            return functional.linear(x, w, bias)
        if parallel.column:
            if not parallel.gathers_input:
                return functional.linear(x, w, bias)
            gathered = parallel.gathered_rows(x, False)
            out = _gathered_product(gathered, parallel.ranks, x, w, bias)
            gathered.release()
            return out
        rows = as_matrix(x)

        def product(some: slice, into: torch.Tensor | None) -> torch.Tensor:
            return product_into(rows[some], w.t(), into)

        out = x.new_empty(parallel.output_shape(inp.shape, w.shape[0]))
        out = parallel.reduced_output(product, rows.shape[0], out, True)
        return _gemm.plus_bias(out, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple:
        return without_autocast(_high_precision_backward, ctx, grad_output)


def _high_precision_backward(ctx: Any, grad_output: torch.Tensor) -> tuple:
    x, w = ctx.saved_tensors
    need_input, need_weight, need_bias = ctx.needs
    input_dtype, weight_dtype, bias_dtype = ctx.dtypes
    parallel = ctx.options.parallel
    late = ctx.options.wgrad_store is not None
    grad_input = grad_weight = grad_bias = gathered_x = gathered_dy = pending = None
    if need_bias:
        grad_bias = as_matrix(grad_output).sum(0).to(bias_dtype)
    if parallel is not None and parallel.gathers_input and need_weight:
        gathered_x = parallel.gathered_rows(x, late=late)
    if parallel is not None and parallel.gathers_gradient and (need_input or need_weight):
        gathered_dy = parallel.gathered_rows(grad_output, need_weight, late)
    if need_input:
        if gathered_dy is not None:
            grad_input = _gathered_product(gathered_dy, parallel.ranks, grad_output, w.t())
            grad_input = grad_input.to(input_dtype)
        elif parallel is not None and parallel.column:
            grad_input, pending = None, _start_input_gradient(parallel, grad_output, w, input_dtype)
        else:
            grad_input = torch.matmul(grad_output, w).to(input_dtype)
    if need_weight:
        if gathered_dy is not None:
            grad_output = gathered_dy.borrow()
        if gathered_x is not None:
            x = gathered_x.borrow()
        grad_weight = plain_weight_gradient(
            ctx.parameter, as_matrix(grad_output), as_matrix(x), weight_dtype, ctx.options
        )
    for gathered in (gathered_x, gathered_dy):
        if gathered is not None:
            gathered.release()
    if pending is not None:
        grad_input = pending.wait().view(ctx.input_shape)
    return grad_input, grad_weight, grad_bias, None, None


def _gathered_product(
    gathered: Pending,
    ranks: int,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes ``rows @ w.T + bias`` of all ranks' rows, piece by piece as these arrive."""
    if torch.compiler.is_compiling():
        return functional.linear(gathered.wait(), w, bias)
    out = x.new_empty(x.shape[0] * ranks, *x.shape[1:-1], w.shape[0])
    for rows, piece in gathered.pieces():
        into = out[rows].view(-1, w.shape[0])
        product_into(as_matrix(piece), w.t(), into, bias)
    return out


def _start_input_gradient(
    parallel: TensorParallel, dy: torch.Tensor, w: torch.Tensor, dtype: torch.dtype
) -> Pending:
    """Begins to sum ``dy @ w`` [rows, in] over the ranks of ``parallel``, in ``dtype``."""
    rows = as_matrix(dy)

    def product(some: slice, into: torch.Tensor | None) -> torch.Tensor:
        return product_into(rows[some], w, into).to(dtype)

    like = torch.empty(0, w.shape[1], dtype=dtype, device=w.device)
    return parallel.start_input_gradient(product, rows.shape[0], like, dtype is dy.dtype)
