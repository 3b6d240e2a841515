"""FP8 GEMMs of a SwiGLU MLP by the suite's own kernels, with the activation in the epilogue.

Where a tensor that an epilogue would quantize must be there before its scale is known, the same
kernels multiply and the activation follows by itself: the bits are equal.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...fp8.scheme.base import shared_scale
from ...fp8.tensor import QuantizedTensor
from ...ops import dense_gemm_swiglu
from ...ops.dense_gemm import dense_gemm
from .fused_casts import ActivationBackward, ActivationForward
from .gemm import GemmPlan, Operand, keeps_input, quantized_weight, weight_recast

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
    later = keeps_input(plan2) and plan2.need_input
    now = keeps_input(plan2) and not later
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
