"""Autograd functions of a linear layer, in FP8 and in bf16 or fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from ...comm.collectives import Pending
from ...ops.op_function import OpFunction, once_differentiable
from ...ops.product_into import product_into
from . import gemm as _gemm
from .context import take_saved, without_autocast
from .gemm import FP8Call, GemmOptions, as_matrix, plain_weight_gradient, weight_gradient
from .heads import HeadGradients, HeadLayout, filled_gradients, sorted_bias, split_output
from .programs import repeatable
from .tensor_parallel import TensorParallel


class LinearFunction(OpFunction):
    """``inp @ weight.T + bias [+ residual]`` [..., out] with quantized fprop, dgrad and wgrad.

    A residual requires ``adds_in_product``. With ``heads``, returns queries, keys and values.
    """

    LABEL = "Linear"

    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        call: FP8Call,
        heads: HeadLayout | None,
        residual: torch.Tensor | None = None,
    ) -> Any:
        if call.programs is None:
            return _linear_forward(ctx, inp, weight, bias, residual, call, heads)
        key = (
            ctx.needs_input_grad, call.dtype, inp.shape, heads, call.keep_columnwise,
            call.options[0].save_original, residual is None,
        )  # fmt: skip
        tensors = (inp, weight, bias, residual)
        return call.programs.forward(ctx, _linear_forward, tensors, (call, heads), key)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple:
        found = _linear_backward(ctx, *grads)
        needs = ctx.needs_input_grad  # shorter without a residual
        return found if len(needs) == len(found) else (*found, grads[0] if needs[5] else None)


def _linear_forward(
    ctx: Any,
    inp: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    call: FP8Call,
    heads: HeadLayout | None,
) -> Any:
    need_input, need_weight, need_bias = ctx.needs_input_grad[:3]
    plan = _gemm.gemm_plan(call, 0, weight, need_input, need_weight, call.keep_columnwise)
    x = as_matrix(inp)
    quantized, part = _gemm.quantized_input(plan, x)
    operand, is_sorted = _gemm.weight_operand(plan, weight, call.cached[0], heads)
    applied = sorted_bias(bias, heads) if is_sorted else bias
    c = None if residual is None else as_matrix(residual)
    out = _gemm.shaped_product(plan, quantized, weight, operand, applied, call.dtype, inp.shape, c)
    original = inp if inp.is_contiguous() else x
    ctx.save_for_backward(*_gemm.saved_by(plan, original, part, weight, operand))
    ctx.plan, ctx.programs, ctx.heads = plan, None, heads
    ctx.bias_dtype = bias.dtype if need_bias and bias is not None else None
    ctx.input_shape = inp.shape
    ctx.input_dtype = inp.dtype
    ctx.device_type = inp.device.type
    if heads is None:
        return out
    parts = split_output(out, heads, is_sorted)
    ctx.output_shapes = [part.shape for part in parts]
    return parts


@repeatable
def _linear_backward(ctx: Any, *grads: Any) -> tuple:
    plan, saved = ctx.plan, take_saved(ctx)
    if saved[0] is not None and saved[0].dim() != 2:  # the original input
        saved = (as_matrix(saved[0]), *saved[1:])
    gathered = _gemm.start_saved_input(plan, saved)
    if ctx.heads is None:
        grad_output: Any = as_matrix(grads[0])
    else:
        filled = filled_gradients(ctx.output_shapes, grads, *grads)
        grad_output = HeadGradients(ctx.heads, filled)
    quantized, grad_bias, dy = _gemm.quantized_gradient(plan, grad_output, ctx.bias_dtype)
    grad_input = grad_weight = pending = None
    if plan.need_input:
        grad_input, pending = _gemm.reduced_input_gradient(plan, saved, quantized, ctx.input_dtype)
    if plan.need_weight:
        grad_weight = weight_gradient(plan, saved, dy, quantized, gathered)
    if pending is not None:
        grad_input = pending.wait()
    if grad_input is not None and len(ctx.input_shape) != 2:
        grad_input = grad_input.view(ctx.input_shape)
    return grad_input, grad_weight, grad_bias, None, None


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
