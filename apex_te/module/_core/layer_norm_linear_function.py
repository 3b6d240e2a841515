"""Autograd function of a norm and a linear layer in FP8, whose norm writes the FP8 input itself."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...fp8.tensor import QuantizedTensor
from ...ops.op_function import OpFunction, once_differentiable
from . import gemm as _gemm
from .context import take_saved
from .fused_casts import NormForward, norm_backward
from .gemm import (
    SAVED,
    FP8Call,
    GemmPlan,
    Operand,
    as_matrix,
    quantized_input,
    weight_gradient,
)
from .heads import HeadGradients, HeadLayout, filled_gradients, sorted_bias, split_output
from .programs import repeatable


class NormOptions(NamedTuple):
    """Options of the norm before a linear layer or an MLP.

    Attributes:
        eps: added to the variance (RMSNorm: to the mean square).
        zero_centered_gamma: gamma is ``1 + weight``.
        return_norm: also return the norm's output in bf16 or fp32.
        return_residual: also return the norm's input: the input, or its sum with a residual.
    """

    is_rms: bool
    eps: float
    zero_centered_gamma: bool
    return_norm: bool
    return_residual: bool


def normalized(
    norm: NormForward, plan: GemmPlan, options: NormOptions
) -> tuple[Operand, QuantizedTensor | None, torch.Tensor | None]:
    """Runs the norm and quantizes its result for fprop; returns ``(operand, local, y)``.

    ``operand`` has the rows of all ranks. ``local`` has this rank's FP8 copies, or is None if rows
    are gathered in bf16 or fp32. ``y``, the norm's output, is None if neither returned nor saved.
    """
    if not options.return_norm and not plan.saves_values:
        return *quantized_input(plan, norm), None
    y = norm.plain()
    return *quantized_input(plan, y), y


def saved_norm(norm: NormForward, inp: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Returns ``(x, weight, mean, rstd)`` for backward; ``x`` [..., cols] is contiguous."""
    x = norm.residual_sum
    if x is None:
        x = inp if inp.is_contiguous() else norm.x
    return x, norm.weight, norm.mean, norm.rstd


def norm_gradients(
    ctx: Any, saved: tuple, d_norm: torch.Tensor, extra: Any, d_residual: Any
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Returns ``(dx, dweight, dbias)`` of the norm, ``dx`` in the input's shape.

    ``d_norm`` comes from the GEMM. ``extra`` and ``d_residual`` are the gradients of the function's
    outputs ``norm`` and ``total`` (the norm's output and input), or None.
    """
    x, weight, mean, rstd = saved
    x = as_matrix(x)
    if extra is not None:
        d_norm = d_norm + extra.reshape(d_norm.shape)
    if d_residual is not None:
        d_residual = d_residual.reshape(x.shape)
    dx, dweight, dbias = norm_backward(
        d_norm, x, weight, mean, rstd, ctx.norm.zero_centered_gamma, d_residual, *ctx.needs_norm
    )
    return dx.view(ctx.input_shape), dweight, dbias


def residual_output(inp: torch.Tensor, norm: NormForward) -> torch.Tensor:
    """Returns the norm's input in the shape of ``inp``, as a new output."""
    if norm.residual_sum is None:
        return inp.view_as(inp)
    return norm.residual_sum if inp.dim() == 2 else norm.residual_sum.view(inp.shape)


class LayerNormLinearFunction(OpFunction):
    """``norm(inp [+ residual]) @ weight.T + bias`` in FP8.

    Returns ``(out, norm, total)``: ``norm`` is the norm's output and ``total`` its input, both None
    unless ``NormOptions`` ask for them. With ``heads`` queries, keys and values replace ``out``.
    """

    LABEL = "LayerNormLinear"

    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        norm_bias: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm_options: NormOptions,
        call: FP8Call,
        heads: HeadLayout | None,
    ) -> tuple[torch.Tensor | None, ...]:
        tensors = (inp, residual, norm_weight, norm_bias, weight, bias)
        if call.programs is None:
            return _forward(ctx, *tensors, norm_options, call, heads)
        key = (
            ctx.needs_input_grad, inp.dtype, inp.shape, norm_options, heads, call.keep_columnwise
        )  # fmt: skip
        return call.programs.forward(ctx, _forward, tensors, (norm_options, call, heads), key)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple:
        return _backward(ctx, *grads)


def _forward(
    ctx: Any,
    inp: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm_options: NormOptions,
    call: FP8Call,
    heads: HeadLayout | None,
) -> tuple[torch.Tensor | None, ...]:
    needs = ctx.needs_input_grad
    need_norm = needs[0] or needs[1] or needs[2] or needs[3]
    plan = _gemm.gemm_plan(call, 0, weight, need_norm, needs[4], call.keep_columnwise)
    rest = None if residual is None else as_matrix(residual)
    norm = NormForward(as_matrix(inp), norm_weight, norm_bias, *norm_options[:3], rest)
    quantized, part, y = normalized(norm, plan, norm_options)
    operand, is_sorted = _gemm.weight_operand(plan, weight, call.cached[0], heads)
    applied = sorted_bias(bias, heads) if is_sorted else bias
    out = _gemm.shaped_product(plan, quantized, weight, operand, applied, inp.dtype, inp.shape)
    norm_saved = saved_norm(norm, inp) if need_norm else (None,) * 4
    ctx.save_for_backward(*_gemm.saved_by(plan, y, part, weight, operand), *norm_saved)
    ctx.set_materialize_grads(False)
    ctx.plan, ctx.norm, ctx.programs, ctx.heads = plan, norm_options, None, heads
    ctx.needs_norm = (needs[2], needs[3])
    ctx.bias_dtype = bias.dtype if bias is not None and needs[5] else None
    ctx.has_residual = residual is not None
    ctx.input_shape, ctx.input_dtype = inp.shape, inp.dtype
    outs = (out,) if heads is None else split_output(out, heads, is_sorted)
    ctx.output_shapes = [part.shape for part in outs]
    ctx.device_type = inp.device.type
    returned = None
    if norm_options.return_norm and y is not None:
        # A view of a matrix, too: torch 2.11 would compile y itself without its gradient.
        returned = y.view(inp.shape)
    total = residual_output(inp, norm) if norm_options.return_residual else None
    return *outs, returned, total


@repeatable
def _backward(ctx: Any, *grads: Any) -> tuple:
    *grad_outputs, grad_norm, grad_residual = grads
    plan, saved = ctx.plan, take_saved(ctx)
    saved_gemm, saved_norm_tensors = saved[:SAVED], saved[SAVED:]
    del saved
    filled = filled_gradients(ctx.output_shapes, grad_outputs, *grads)
    dy = as_matrix(filled[0]) if ctx.heads is None else HeadGradients(ctx.heads, filled)
    gathered = _gemm.start_saved_input(plan, saved_gemm)
    quantized, grad_bias, dy = _gemm.quantized_gradient(plan, dy, ctx.bias_dtype)
    grad_weight = dx = d_gamma = d_beta = pending = None
    if plan.need_input:
        d_norm, pending = _gemm.reduced_input_gradient(plan, saved_gemm, quantized, ctx.input_dtype)
        if d_norm is not None:  # frees the norm's memory before the weight gradient takes its own
            dx, d_gamma, d_beta = norm_gradients(
                ctx, saved_norm_tensors, d_norm, grad_norm, grad_residual
            )
            del d_norm
    if plan.need_weight:
        grad_weight = weight_gradient(plan, saved_gemm, dy, quantized, gathered)
    if pending is not None:
        dx, d_gamma, d_beta = norm_gradients(
            ctx, saved_norm_tensors, pending.wait(), grad_norm, grad_residual
        )
    d_residual = dx if ctx.has_residual else None
    return dx, d_residual, d_gamma, d_beta, grad_weight, grad_bias, None, None, None
