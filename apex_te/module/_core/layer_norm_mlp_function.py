"""Autograd function of LayerNormMLP in FP8, and its GEMMs with fused SwiGLU.

Where a tensor that an epilogue would quantize must be there before its scale is known, the same
kernels multiply and the activation follows by itself: the bits are equal.

That saves the high-precision input of each GEMM for schemes that know the scale before the data
(delayed scaling) or find it in a pass before the cast (current scaling). Block scales are found in
the high-precision result, which the kernels of gated activations do not write.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...fp8.scheme.base import shared_scale
from ...fp8.tensor import QuantizedTensor
from ...ops import dense_gemm_swiglu
from ...ops.dense_gemm import dense_gemm
from ...ops.op_function import OpFunction, once_differentiable
from . import gemm as _gemm
from .context import take_saved
from .fused_casts import ActivationBackward, ActivationForward, NormForward
from .gemm import (
    SAVED,
    FP8Call,
    GemmPlan,
    Operand,
    as_matrix,
    quantized_weight,
    weight_gradient,
    weight_recast,
)
from .heads import output_gradient
from .layer_norm_linear_function import (
    NormOptions,
    norm_gradients,
    normalized,
    residual_output,
    saved_norm,
)
from .programs import repeatable

_SWIGLU = "swiglu"
_Operands = tuple[Any, Any, Any, Any]


class ActivatedProduct(NamedTuple):
    """FC1's output ``[rows, 2F]`` in bf16, and FP8 copies of the activation's result.

    ``act_scale``, fp32 ``[1]``, is the scale with which backward makes the columnwise copy; None if
    backward needs no such copy, or ``act`` has it.
    """

    hidden: torch.Tensor
    act: QuantizedTensor
    act_scale: torch.Tensor | None


def takes(
    plan1: GemmPlan,
    plan2: GemmPlan,
    activation: str,
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
) -> bool:
    """Returns True if the kernels of this module compute FC1 and FC2's dgrad for a call.

    This depends on shapes, dtypes, recipe and options, not on which tensors need a gradient, so
    that a recompute and an evaluation run the same GEMMs as the training step.
    """
    first, second = plan1.quantizers, plan2.quantizers
    if not (first.backend.fuses_swiglu and second.backend.fuses_swiglu) or activation != _SWIGLU:
        return False
    if b1 is not None or x.dtype is not torch.bfloat16:
        return False
    if not (first.grad_output.keeps_scale and second.input.keeps_scale):
        return False
    for plan in (plan1, plan2):
        if plan.options.parallel is not None or plan.quantizers.high_precision_wgrad:
            return False
    if plan2.options.save_original:
        return False
    return dense_gemm_swiglu.gains(x.shape[0], w1.shape[0] // 2, w1.shape[1])


def activated_product(
    plan1: GemmPlan,
    plan2: GemmPlan,
    x: Operand,
    w1: torch.Tensor,
    weight: QuantizedTensor | None,
) -> ActivatedProduct:
    """Computes FC1 and the activation; ``weight``, FP8 copies of ``w1``, are made here if None."""
    assert isinstance(x, QuantizedTensor)  # no rows are gathered
    if weight is None:
        weight = quantized_weight(plan1.quantizers, plan1.quantizers.weight, w1, False)
    operands: _Operands = (
        x.rowwise, weight.rowwise, x.rowwise_scale_inv, weight.rowwise_scale_inv
    )  # fmt: skip
    quantizer = plan2.quantizers.input
    # Backward makes the columnwise copy beside FC2's dgrad, if it computes that.
    later = plan2.keeps_input and plan2.need_input
    now = plan2.keeps_input and not later
    known = None if now else quantizer.scale_in_advance()
    if known is None:
        hidden = dense_gemm(*operands)
        act = quantizer.produce(ActivationForward(_SWIGLU, hidden), True, now)
    else:
        scale, amax = known
        hidden, out = dense_gemm_swiglu.dense_gemm_swiglu(*operands, scale, amax=amax)
        act = shared_scale(out, quantizer.dtype)
    return ActivatedProduct(hidden, act, quantizer.snapshot() if later else None)


def hidden_gradient(
    plan1: GemmPlan,
    plan2: GemmPlan,
    saved: tuple,
    dy: QuantizedTensor,
    hidden: torch.Tensor,
    act_scale: torch.Tensor | None,
) -> tuple[QuantizedTensor, torch.Tensor | None]:
    """Computes FC2's dgrad and the activation's gradient, and the activation once more.

    Returns ``(d_hidden, act)``; ``act`` has columnwise FP8 data, and is None without ``act_scale``.
    Frees the rowwise copy of ``dy``; wgrad may then reuse its memory.
    """
    weight, quantizer = weight_recast(plan2, saved), plan1.quantizers.grad_output
    operands: _Operands = (
        dy.rowwise, weight.columnwise, dy.rowwise_scale_inv, weight.columnwise_scale_inv
    )  # fmt: skip
    known = quantizer.scale_in_advance()
    if known is not None:
        scale, amax = known
        out, act = dense_gemm_swiglu.dense_gemm_swiglu_bwd(
            *operands, hidden, scale, quantizer.dtype, columnwise=plan1.need_weight, amax=amax,
            act_scale=act_scale,
        )  # fmt: skip
        dy.rowwise = None
        return shared_scale(out, quantizer.dtype), act
    d_act = dense_gemm(*operands, use_split_accumulator=True)
    dy.rowwise = act = None
    if act_scale is not None:
        fp8 = plan2.quantizers.input.dtype
        act = ActivationForward(_SWIGLU, hidden).fp8(act_scale, fp8, False, True, None, True)[1]
    gradient = ActivationBackward(_SWIGLU, d_act, hidden, False)
    return quantizer.produce(gradient, plan1.need_input, plan1.need_weight), act


class LayerNormMLPFunction(OpFunction):
    """``act(norm(inp [+ residual]) @ w1.T + b1) @ w2.T + b2`` in FP8.

    With ``adds``, which requires ``adds_in_product``, the second GEMM adds the norm's input. A
    recompute passes the shape of ``out`` as ``known``: backward does not need the second GEMM, so
    it is skipped, and ``out`` is uninitialised. Returns ``(out, norm, total)``: ``norm`` is the
    norm's output and ``total`` its input, both None unless asked for.
    """

    LABEL = "LayerNormMLP"

    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        norm_bias: torch.Tensor | None,
        w1: torch.Tensor,
        b1: torch.Tensor | None,
        w2: torch.Tensor,
        b2: torch.Tensor | None,
        norm_options: NormOptions,
        activation: str,
        call: FP8Call,
        adds: bool,
        known: torch.Size | None = None,
    ) -> tuple[torch.Tensor | None, ...]:
        tensors = (inp, residual, norm_weight, norm_bias, w1, b1, w2, b2)
        if call.programs is None or known is not None:
            return _forward(ctx, *tensors, norm_options, activation, call, adds, known)
        key = (
            ctx.needs_input_grad, inp.dtype, inp.shape, norm_options, activation,
            call.keep_columnwise, adds, dense_gemm_swiglu.is_active,
        )  # fmt: skip
        rest = (norm_options, activation, call, adds, known)
        return call.programs.forward(ctx, _forward, tensors, rest, key)

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
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    norm_options: NormOptions,
    activation: str,
    call: FP8Call,
    adds: bool,
    known: torch.Size | None,
) -> tuple[torch.Tensor | None, ...]:
    needs, dtype = ctx.needs_input_grad, inp.dtype
    need_norm = needs[0] or needs[1] or needs[2] or needs[3]
    need_hidden = need_norm or needs[4] or needs[5]
    keep = call.keep_columnwise
    plan1 = _gemm.gemm_plan(call, 0, w1, need_norm, needs[4], keep)
    plan2 = _gemm.gemm_plan(call, 1, w2, need_hidden, needs[6], keep)

    rest = None if residual is None else as_matrix(residual)
    norm = NormForward(as_matrix(inp), norm_weight, norm_bias, *norm_options[:3], rest)
    quantized, part, y = normalized(norm, plan1, norm_options)
    weight1, _ = _gemm.weight_operand(plan1, w1, call.cached[0])
    saved1 = _gemm.saved_by(plan1, y, part, w1, weight1)
    plain = act_scale = None
    operand: Operand
    fuses = takes(plan1, plan2, activation, norm.x, w1, b1)
    if fuses:
        hidden, operand, act_scale = activated_product(plan1, plan2, quantized, w1, weight1)
        part = operand
        del quantized, weight1
    else:
        hidden = _gemm.multiply(plan1.quantizers, quantized, w1, weight1, b1, dtype)
        del quantized, part, weight1
        act = ActivationForward(activation, hidden)
        plain = act.plain() if plan2.saves_values else None
        operand, part = _gemm.quantized_input(plan2, act if plain is None else plain)
    # With sequence parallelism the hidden rows are those of all ranks, and are split again.
    shape: tuple[int, ...] = inp.shape
    if plan1.options.parallel is not None:
        shape = plan1.options.parallel.output_shape(shape, shape[-1])
    weight2, _ = _gemm.weight_operand(plan2, w2, call.cached[1])
    c = None
    if adds:
        c = norm.x if norm.residual_sum is None else norm.residual_sum
    if known is None:
        out = _gemm.shaped_product(plan2, operand, w2, weight2, b2, dtype, shape, c)
    else:
        out = inp.new_empty(known, dtype=dtype)

    ctx.save_for_backward(
        *saved1,
        *_gemm.saved_by(plan2, plain, part, w2, weight2),
        *(saved_norm(norm, inp) if need_norm else (None,) * 4),
        hidden if need_hidden else None,
        act_scale,
    )
    ctx.set_materialize_grads(False)
    ctx.plans, ctx.norm, ctx.activation = (plan1, plan2), norm_options, activation
    ctx.fuses = fuses
    ctx.needs_norm = (needs[2], needs[3])
    ctx.bias_dtypes = (
        b1.dtype if b1 is not None and needs[5] else None,
        b2.dtype if b2 is not None and needs[7] else None,
    )
    ctx.programs, ctx.has_residual, ctx.adds = None, residual is not None, adds
    ctx.input_shape, ctx.input_dtype = inp.shape, dtype
    ctx.output_shape = out.shape
    ctx.device_type = inp.device.type
    returned = None
    if norm_options.return_norm and y is not None:
        # A view of a matrix, too: torch 2.11 would compile y itself without its gradient.
        returned = y.view(inp.shape)
    total = residual_output(inp, norm) if norm_options.return_residual else None
    return out, returned, total


@repeatable
def _backward(ctx: Any, grad_output: Any, grad_norm: Any, grad_residual: Any) -> tuple:
    saved = take_saved(ctx)
    saved1, saved2 = saved[:SAVED], saved[SAVED : 2 * SAVED]
    norm, hidden, act_scale = saved[2 * SAVED : -2], saved[-2], saved[-1]
    del saved
    (plan1, plan2), (b1_dtype, b2_dtype) = ctx.plans, ctx.bias_dtypes
    dy = as_matrix(output_gradient(ctx.output_shape, grad_output, grad_norm, grad_residual))
    if ctx.adds:  # then there is no third output
        grad_residual = grad_output
    quantized, d_b2, dy = _gemm.quantized_gradient(plan2, dy, b2_dtype)
    d_w1 = d_b1 = d_w2 = d_act = d_fused = dx = d_gamma = d_beta = None
    # Every step frees what only it needed: the peak is that of bf16 modules or below.
    if plan2.need_input and ctx.fuses:
        d_fused, act = hidden_gradient(plan1, plan2, saved2, quantized, hidden, act_scale)
        saved2 = saved2 if act is None else (act, *saved2[1:])
        del hidden, act
    elif plan2.need_input:
        d_act = _gemm.input_gradient(plan2, saved2, quantized, ctx.input_dtype)
    if plan2.need_weight:
        d_w2 = weight_gradient(plan2, saved2, dy, quantized)
    del saved2, quantized, dy
    if plan2.need_input:
        gathered = _gemm.start_saved_input(plan1, saved1)
        if d_act is None:
            quantized, plain, d_fused = d_fused, None, None
        else:
            d_hidden = ActivationBackward(ctx.activation, d_act, hidden, b1_dtype is not None)
            quantized, plain = _quantized_hidden(plan1, d_hidden)
            d_b1 = d_hidden.dbias
            del d_act, d_hidden, hidden
        pending = None
        if plan1.need_input:
            d_norm, pending = _gemm.reduced_input_gradient(
                plan1, saved1, quantized, ctx.input_dtype
            )
            if d_norm is not None:
                dx, d_gamma, d_beta = norm_gradients(ctx, norm, d_norm, grad_norm, grad_residual)
            del d_norm
        if plan1.need_weight:
            d_w1 = weight_gradient(plan1, saved1, plain, quantized, gathered)
        if pending is not None:
            dx, d_gamma, d_beta = norm_gradients(
                ctx, norm, pending.wait(), grad_norm, grad_residual
            )
    if d_b1 is not None and d_b1.dtype is not b1_dtype:
        d_b1 = d_b1.to(b1_dtype)
    d_residual = dx if ctx.has_residual else None
    gradients = (dx, d_residual, d_gamma, d_beta, d_w1, d_b1, d_w2, d_b2)
    return (*gradients, None, None, None, None, None)


def _quantized_hidden(plan: Any, d_hidden: ActivationBackward) -> tuple:
    """Returns the gradient of the first GEMM's output in FP8, and in bf16 or fp32, or None.

    Sets ``d_hidden.dbias`` if its ``with_dbias`` is True.
    """
    quantizer = plan.quantizers.grad_output
    need_plain = plan.need_weight and plan.quantizers.high_precision_wgrad
    fp8_wgrad = plan.need_weight and not need_plain
    if not need_plain and (plan.need_input or fp8_wgrad):  # else only the bias learns
        return quantizer.produce(d_hidden, plan.need_input, fp8_wgrad), None
    plain = d_hidden.plain()
    if d_hidden.with_dbias and d_hidden.dbias is None:
        d_hidden.dbias = plain.sum(0)
    if not plan.need_input:
        return None, plain
    return quantizer.quantize(plain, True, False)[0], plain
