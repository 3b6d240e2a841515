"""Forward of Linear: quantize input and weight, one FP8 GEMM; or plain maths with a fused wgrad."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ..ops.fp8_gemm import fp8_gemm
from ..quantizer import GemmQuantizers
from ..tensor import QuantizedTensor
from ._linear_backward import as_matrix, backward_fp8, backward_high_precision

__all__ = ["FP8LinearFunction", "HighPrecisionLinearFunction", "forward_fp8"]


def forward_fp8(
    inp: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    quantizers: GemmQuantizers,
    cached: Any,
    out_dtype: torch.dtype,
    keep_input: bool,
) -> tuple[Any, torch.Tensor, QuantizedTensor]:
    """``inp @ weight.T + bias`` in FP8: the output [..., out], the input matrix and its FP8 form.

    ``keep_input`` asks for the transposed FP8 input, which the weight gradient needs.
    """
    x = as_matrix(inp)
    quantized: Any = quantizers.input.quantize(x, True, keep_input)[0]
    if cached is None:
        cached, _ = quantizers.weight.quantize(weight.contiguous(), True, False)
    shape = inp.shape
    if len(shape) == 2:
        out = fp8_gemm(
            quantized.rowwise,
            cached.rowwise,
            quantized.scale_inv,
            cached.scale_inv,
            out_dtype=out_dtype,
            bias=bias,
        )
        return out, x, quantized
    # The output must not be a view made in here, or autograd would refuse to change it in place.
    features = weight.shape[0]
    out = torch.empty(*shape[:-1], features, dtype=out_dtype, device=inp.device)
    fp8_gemm(
        quantized.rowwise,
        cached.rowwise,
        quantized.scale_inv,
        cached.scale_inv,
        out=out.view(x.shape[0], features),
        out_dtype=out_dtype,
        bias=bias,
    )
    return out, x, quantized


class FP8LinearFunction(torch.autograd.Function):
    """FP8 Linear: three FP8 GEMMs, of the input only what the weight gradient needs is saved."""

    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        quantizers: GemmQuantizers,
        cached: QuantizedTensor | None,
        out_dtype: torch.dtype,
        accumulate: bool | None,
    ) -> torch.Tensor:
        need_input, need_weight, _ = needs = ctx.needs_input_grad[:3]
        hp_wgrad = quantizers.high_precision_wgrad
        keep_input = need_weight and not hp_wgrad
        out, x, quantized = forward_fp8(
            inp, weight, bias, quantizers, cached, out_dtype, keep_input
        )
        saved_x = saved_w = x_scale_inv = w_scale_inv = None
        if keep_input:
            saved_x, x_scale_inv = quantized.transposed, quantized.scale_inv
        elif need_weight:
            saved_x = x
        if need_input:
            if cached is None:
                saved_w = weight  # its transposed copy is made again in backward
            else:
                saved_w, w_scale_inv = cached.transposed, cached.scale_inv
        ctx.save_for_backward(saved_x, x_scale_inv, saved_w, w_scale_inv)
        ctx.quantizers = quantizers
        ctx.needs = needs
        ctx.input_shape = inp.shape
        ctx.dtypes = (inp.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.accumulate = accumulate
        # main_grad is an attribute of this very parameter, which a saved copy could lose.
        ctx.parameter = weight if accumulate is not None and need_weight else None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple:
        return backward_fp8(ctx, grad_output)


class HighPrecisionLinearFunction(torch.autograd.Function):
    """Linear without FP8 whose weight gradient goes straight into ``weight.main_grad``."""

    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        accumulate: bool,
    ) -> torch.Tensor:
        need_input, need_weight, _ = ctx.needs_input_grad[:3]
        x, w = inp.to(out_dtype), weight.to(out_dtype)
        ctx.save_for_backward(x if need_weight else None, w if need_input else None)
        ctx.needs = ctx.needs_input_grad[:3]
        ctx.dtypes = (inp.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.accumulate = accumulate
        ctx.parameter = weight if need_weight else None
        return functional.linear(x, w, None if bias is None else bias.to(out_dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple:
        return backward_high_precision(ctx, grad_output)
