"""Differentiable forms of ``fused_conv_bias_relu``; under CUDA's autocast they compute in fp16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from apex_te.compatibility.apex import fused_conv_bias_relu as extension

__all__ = ["ConvBias", "ConvBiasMaskReLU", "ConvBiasReLU", "ConvFrozenScaleBiasReLU"]

_to_half = torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float16)
_as_forward = torch.amp.custom_bwd(device_type="cuda")


def _function(
    run: Callable[..., list[torch.Tensor]],
    differentiate: Callable[..., list[torch.Tensor]],
    kept: slice,
    keeps_y: bool,
) -> type[torch.autograd.Function]:
    """Makes the class whose ``apply`` takes x, weight, other tensors, padding and stride.

    ``kept`` are the tensors that backward takes, before y if ``keeps_y`` and y's gradient.
    """

    class Conv(torch.autograd.Function):
        @staticmethod
        @_to_half
        def forward(ctx: Any, *args: Any) -> torch.Tensor:
            *tensors, ctx.padding, ctx.stride = args
            (y,) = run(tensors, ctx.padding, ctx.stride)
            ctx.save_for_backward(*tensors[kept], *([y] if keeps_y else []))
            ctx.shapes = [t.shape for t in tensors]
            return y

        @staticmethod
        @_as_forward
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            found = differentiate([*ctx.saved_tensors, *grads], ctx.padding, ctx.stride)
            found = [g.view(shape) for g, shape in zip(found, ctx.shapes, strict=False)]
            return *found, *[None] * (len(ctx.shapes) + 2 - len(found))

    return Conv


ConvBiasReLU_ = _function(extension.forward, extension.backward, slice(2), True)
ConvBiasMaskReLU_ = _function(extension.forward_mask, extension.backward, slice(2), True)
ConvBias_ = _function(extension.forward_no_relu, extension.backward_no_relu, slice(2), False)
ConvFrozenScaleBiasReLU_ = _function(
    extension.forward_cscale_cbias_relu, extension.backward_cscale_cbias_relu, slice(3), True
)
ConvBiasReLU = ConvBiasReLU_.apply
ConvBiasMaskReLU = ConvBiasMaskReLU_.apply
ConvBias = ConvBias_.apply
ConvFrozenScaleBiasReLU = ConvFrozenScaleBiasReLU_.apply
