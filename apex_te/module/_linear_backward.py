"""Backward of Linear: quantize the output gradient once, then dgrad and wgrad."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..ops.fp8_gemm import fp8_gemm

__all__ = ["as_matrix", "backward_fp8", "backward_high_precision"]

_dummies: dict[tuple, torch.Tensor] = {}


def backward_fp8(ctx: Any, grad_output: torch.Tensor) -> tuple:
    """Gradients of input, weight and bias for FP8LinearFunction."""
    device_type = grad_output.device.type
    if torch.is_autocast_enabled(device_type):  # our maths have fixed dtypes
        with torch.autocast(device_type, enabled=False):
            return _backward_fp8(ctx, grad_output)
    return _backward_fp8(ctx, grad_output)


def _backward_fp8(ctx: Any, grad_output: torch.Tensor) -> tuple:
    x, x_scale_inv, w, w_scale_inv = ctx.saved_tensors
    need_input, need_weight, need_bias = ctx.needs
    input_dtype, weight_dtype, bias_dtype = ctx.dtypes
    quantizers = ctx.quantizers
    dy = as_matrix(grad_output)
    fp8_wgrad = need_weight and not quantizers.high_precision_wgrad
    quantized: Any = None
    grad_input: Any = None
    grad_weight: Any = None
    grad_bias: torch.Tensor | None = None
    if need_input or fp8_wgrad:
        quantized, grad_bias = quantizers.grad_output.quantize(dy, need_input, fp8_wgrad, need_bias)
    elif need_bias:
        grad_bias = dy.sum(0)
    if need_input:
        if w_scale_inv is None:
            weight, _ = quantizers.weight_again.quantize(w.contiguous(), False, True)
            w, w_scale_inv = weight.transposed, weight.scale_inv
        grad_input = fp8_gemm(
            quantized.rowwise,
            w,
            quantized.scale_inv,
            w_scale_inv,
            out_dtype=input_dtype,
            use_split_accumulator=True,
        )
        shape = ctx.input_shape
        if len(shape) != 2:
            grad_input = grad_input.view(shape)
    if need_weight:
        parameter = ctx.parameter
        if not fp8_wgrad:
            grad_weight = _plain_wgrad(dy, x, parameter, weight_dtype, ctx.accumulate)
        elif parameter is None:
            grad_weight = fp8_gemm(
                quantized.transposed,
                x,
                quantized.scale_inv,
                x_scale_inv,
                out_dtype=weight_dtype,
                use_split_accumulator=True,
            )
        else:
            main_grad, accumulate = _main_grad(parameter, ctx.accumulate)
            fp8_gemm(
                quantized.transposed,
                x,
                quantized.scale_inv,
                x_scale_inv,
                out=main_grad,
                out_dtype=main_grad.dtype,
                accumulate=accumulate,
                use_split_accumulator=True,
            )
            grad_weight = _dummy_gradient(parameter)
    if grad_bias is not None and grad_bias.dtype is not bias_dtype:
        grad_bias = grad_bias.to(bias_dtype)
    return grad_input, grad_weight, grad_bias, None, None, None, None


def backward_high_precision(ctx: Any, grad_output: torch.Tensor) -> tuple:
    """Gradients of input, weight and bias for HighPrecisionLinearFunction."""
    x, w = ctx.saved_tensors
    need_input, need_weight, need_bias = ctx.needs
    input_dtype, weight_dtype, bias_dtype = ctx.dtypes
    grad_input = grad_weight = grad_bias = None
    with torch.autocast(grad_output.device.type, enabled=False):
        dy = as_matrix(grad_output)
        if need_input:
            grad_input = torch.matmul(grad_output, w).to(input_dtype)
        if need_weight:
            x = as_matrix(x)
            grad_weight = _plain_wgrad(dy, x, ctx.parameter, weight_dtype, ctx.accumulate)
        if need_bias:
            grad_bias = dy.sum(0).to(bias_dtype)
    return grad_input, grad_weight, grad_bias, None, None


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """``x`` [..., n] as a contiguous matrix [rows, n]; any number of rows, none included."""
    if x.dim() != 2:
        x = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return x.contiguous()


def _plain_wgrad(
    dy: torch.Tensor,
    x: torch.Tensor,
    parameter: Any,
    dtype: torch.dtype,
    accumulate: bool | None,
) -> torch.Tensor | None:
    """Weight gradient in high precision, returned or put into ``main_grad``."""
    grad = torch.mm(dy.t(), x.to(dy.dtype))
    if parameter is None:
        return grad.to(dtype)
    main_grad, accumulate = _main_grad(parameter, accumulate)
    if accumulate:
        main_grad.add_(grad)
    else:
        main_grad.copy_(grad)
    return _dummy_gradient(parameter)


def _main_grad(parameter: Any, accumulate: bool | None) -> tuple[torch.Tensor, bool]:
    """The preallocated gradient as [out, in], and whether to add to it."""
    if hasattr(parameter, "__fsdp_param__"):
        main_grad = parameter.get_main_grad()
    else:
        main_grad = getattr(parameter, "main_grad", None)
    if main_grad is None:
        raise ValueError(
            "Linear: weight.main_grad must be a preallocated tensor when "
            "fuse_wgrad_accumulation=True, got None"
        )
    if main_grad.numel() != parameter.numel() or not main_grad.is_contiguous():
        raise ValueError(
            f"Linear: weight.main_grad must be contiguous with shape {list(parameter.shape)}, "
            f"got {list(main_grad.shape)}"
        )
    if getattr(parameter, "overwrite_main_grad", False):
        accumulate = False
    return main_grad.view(parameter.shape), bool(accumulate)


def _dummy_gradient(parameter: Any) -> torch.Tensor | None:
    """What autograd gets when the gradient is already in ``main_grad``.

    None leaves ``.grad`` at None. A framework that waits for a gradient hook sets
    ``grad_added_to_main_grad``: it gets a tensor shared by all weights of that shape.
    """
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    key = (parameter.shape, parameter.dtype, parameter.device)
    dummy = _dummies.get(key)
    if dummy is None:
        dummy = _dummies[key] = torch.zeros_like(parameter, requires_grad=False)
    if getattr(parameter, "zero_out_wgrad", False):
        dummy.zero_()
    return dummy.detach()
