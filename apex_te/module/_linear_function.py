"""The autograd functions of a linear layer: quantized, and plain with a fused weight gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ..quantizer import GemmQuantizers
from ..tensor import QuantizedTensor
from . import _gemm
from ._gemm import GemmOptions, as_matrix

__all__ = [
    "HighPrecisionLinearFunction",
    "LinearFunction",
    "linear_forward",
    "shaped_output",
    "take_saved",
    "without_autocast",
]


def without_autocast(backward: Any, ctx: Any, *grads: Any) -> Any:
    """Run a backward whose products keep their dtypes under ``torch.autocast``."""
    device_type = ctx.device_type
    if not torch.is_autocast_enabled(device_type):
        return backward(ctx, *grads)
    with torch.autocast(device_type, enabled=False):
        return backward(ctx, *grads)


def take_saved(ctx: Any) -> tuple:
    """The saved tensors, which die with the caller's references unless the graph is retained.

    Autograd would keep them all until backward returns.
    """
    saved = ctx.saved_tensors
    if not torch.compiler.is_compiling() and isinstance(ctx, torch._C._FunctionBase):
        ctx.maybe_clear_saved_tensors()  # type: ignore[attr-defined]
    return saved


def shaped_output(inp: torch.Tensor, features: int, dtype: torch.dtype) -> torch.Tensor | None:
    """The output [..., features] of an ``inp`` that is no matrix, else None.

    The output must not be a view made in a Function, or autograd would refuse to change it in
    place.
    """
    if inp.dim() == 2:
        return None
    return torch.empty(*inp.shape[:-1], features, dtype=dtype, device=inp.device)


def linear_forward(
    inp: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    quantizers: GemmQuantizers,
    cached: QuantizedTensor | None,
    out_dtype: torch.dtype,
    keep: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, QuantizedTensor]:
    """``inp @ weight.T + bias``: the output [..., out], the input as a matrix, and quantized."""
    x = as_matrix(inp)
    quantized = quantizers.input.quantize(x, True, keep)[0]
    features = weight.shape[0]
    out = shaped_output(inp, features, out_dtype)
    flat = None if out is None else out.view(x.shape[0], features)
    result = _gemm.multiply(quantizers, quantized, weight, cached, bias, out_dtype, flat)
    return result if out is None else out, x, quantized


class LinearFunction(torch.autograd.Function):
    """Three quantized GEMMs; of the input only what the weight gradient needs is saved."""

    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        quantizers: GemmQuantizers,
        cached: QuantizedTensor | None,
        out_dtype: torch.dtype,
        options: GemmOptions,
    ) -> torch.Tensor:
        need_input, need_weight, need_bias = ctx.needs_input_grad[:3]
        plan = _gemm.gemm_plan(quantizers, weight, need_input, need_weight, options, cached)
        out, x, quantized = linear_forward(
            inp, weight, bias, quantizers, cached, out_dtype, _gemm.keeps_input(plan)
        )
        ctx.save_for_backward(*_gemm.saved_by(plan, x, quantized, weight, cached))
        ctx.plan = plan
        ctx.bias_dtype = bias.dtype if need_bias and bias is not None else None
        ctx.input_shape = inp.shape
        ctx.input_dtype = inp.dtype
        ctx.device_type = inp.device.type
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple:
        return without_autocast(_linear_backward, ctx, grad_output)


def _linear_backward(ctx: Any, grad_output: torch.Tensor) -> tuple:
    plan, saved = ctx.plan, take_saved(ctx)
    dy = as_matrix(grad_output)
    quantized, grad_bias = _gemm.quantized_gradient(plan, dy, ctx.bias_dtype)
    grad_input = grad_weight = None
    if plan.need_input:
        grad_input = _gemm.input_gradient(plan, saved, quantized, ctx.input_dtype)
        if len(ctx.input_shape) != 2:
            grad_input = grad_input.view(ctx.input_shape)
    if plan.need_weight:
        grad_weight = _gemm.weight_gradient(plan, saved, dy, quantized)
    return grad_input, grad_weight, grad_bias, None, None, None, None


class HighPrecisionLinearFunction(torch.autograd.Function):
    """A plain linear layer whose weight gradient goes into ``main_grad`` or is computed later."""

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
        x, w = inp.to(out_dtype), weight.to(out_dtype)
        ctx.save_for_backward(x if need_weight else None, w if need_input else None)
        ctx.needs = ctx.needs_input_grad[:3]
        ctx.dtypes = (inp.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.options = options
        ctx.parameter = weight if need_weight else None
        ctx.device_type = inp.device.type
        return functional.linear(x, w, None if bias is None else bias.to(out_dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple:
        return without_autocast(_high_precision_backward, ctx, grad_output)


def _high_precision_backward(ctx: Any, grad_output: torch.Tensor) -> tuple:
    x, w = ctx.saved_tensors
    need_input, need_weight, need_bias = ctx.needs
    input_dtype, weight_dtype, bias_dtype = ctx.dtypes
    grad_input = grad_weight = grad_bias = None
    dy = as_matrix(grad_output)
    if need_input:
        grad_input = torch.matmul(grad_output, w).to(input_dtype)
    if need_weight:
        grad_weight = _gemm.plain_weight_gradient(
            ctx.parameter, dy, as_matrix(x), weight_dtype, ctx.options
        )
    if need_bias:
        grad_bias = dy.sum(0).to(bias_dtype)
    return grad_input, grad_weight, grad_bias, None, None
