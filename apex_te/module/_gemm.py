"""The steps of one quantized GEMM of a module: forward, what it saves, and its two gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..parameter import FP8Parameter, held_copies, plain_values
from ..quantizer import GemmQuantizers
from ..tensor import QuantizedTensor

__all__ = [
    "GemmOptions",
    "GemmPlan",
    "as_matrix",
    "gemm_plan",
    "input_gradient",
    "keeps_input",
    "multiply",
    "plain_weight_gradient",
    "quantized_gradient",
    "saved_by",
    "weight_gradient",
]

SAVED = 4  # tensors that `saved_by` gives
_dummies: dict[tuple, torch.Tensor] = {}


class GemmOptions(NamedTuple):
    """How a module wants one GEMM.

    ``accumulate``: None makes ``weight.grad``; True adds to ``weight.main_grad``, False overwrites
    it. ``save_original``: save the input as it came instead of its FP8 copy. ``delayed``: takes the
    weight gradient's computation, to be run later.
    """

    accumulate: bool | None = None
    save_original: bool = False
    delayed: Callable[[Callable[[], None]], None] | None = None


class GemmPlan(NamedTuple):
    """What the backward of one GEMM has to know besides tensors."""

    quantizers: GemmQuantizers
    need_input: bool
    need_weight: bool
    weight_dtype: torch.dtype
    options: GemmOptions
    parameter: Any  # the weight whose main_grad or .grad is written here, else None
    weight_cached: bool


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """``x`` [..., n] as a contiguous matrix [rows, n]; any number of rows, none included."""
    if x.dim() != 2:
        x = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return x.contiguous()


def gemm_plan(
    quantizers: GemmQuantizers,
    weight: torch.Tensor,
    need_input: bool,
    need_weight: bool,
    options: GemmOptions,
    cached: QuantizedTensor | None,
) -> GemmPlan:
    """The plan of a GEMM whose gradients are needed as said."""
    in_place = options.accumulate is not None or options.delayed is not None
    # main_grad is an attribute of this very parameter, which a saved copy could lose.
    parameter = weight if in_place and need_weight else None
    return GemmPlan(
        quantizers, need_input, need_weight, weight.dtype, options, parameter, cached is not None
    )


def keeps_input(plan: GemmPlan) -> bool:
    """Whether the forward has to make the transposed copy of the input."""
    if plan.options.save_original or plan.quantizers.high_precision_wgrad:
        return False
    return plan.need_weight


def multiply(
    quantizers: GemmQuantizers,
    x: QuantizedTensor,
    weight: torch.Tensor,
    cached: QuantizedTensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x @ weight.T + bias``, [rows, out]; the weight is quantized unless ``cached`` is given."""
    if cached is None:
        cached = _quantized_weight(quantizers, quantizers.weight, weight, False)
    return quantizers.products.fprop(x, cached, out_dtype, bias, out)


def _quantized_weight(
    quantizers: GemmQuantizers, quantizer: Any, weight: torch.Tensor, transposed: bool
) -> QuantizedTensor:
    """One copy of a weight: what it holds if the products read that, else quantized now."""
    if type(weight) is FP8Parameter:
        held = held_copies(weight, quantizers, transposed)
        if held is not None:
            return held
    weight = plain_values(weight).contiguous()
    return quantizer.quantize(weight, not transposed, transposed)[0]


def saved_by(
    plan: GemmPlan,
    x: torch.Tensor | None,
    quantized: QuantizedTensor,
    weight: torch.Tensor,
    cached: QuantizedTensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """What backward needs: of the input its transposed FP8 copy, or ``x`` where that is wanted.

    Of the weight itself (its transposed copy is made again) or of the cache.
    """
    saved_x = saved_w = x_scale = w_scale = None
    if plan.need_weight:
        if keeps_input(plan):
            saved_x, x_scale = quantized.transposed, quantized.transposed_scale_inv
        else:
            saved_x = x
            if plan.options.save_original and not plan.quantizers.high_precision_wgrad:
                x_scale = plan.quantizers.input.snapshot()
    if plan.need_input:
        if cached is None:
            saved_w = weight
        else:
            saved_w, w_scale = cached.transposed, cached.transposed_scale_inv
    return saved_x, x_scale, saved_w, w_scale


def input_gradient(
    plan: GemmPlan,
    saved: tuple,
    dy: QuantizedTensor,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``dy @ weight``, [rows, in]; ``saved`` is what ``saved_by`` gave.

    Takes the rowwise copy of ``dy``, whose memory the weight gradient may then have.
    """
    _, _, w, w_scale = saved
    quantizers = plan.quantizers
    if plan.weight_cached:
        weight = QuantizedTensor(None, None, w, w_scale, quantizers.weight.dtype)
    else:
        weight = _quantized_weight(quantizers, quantizers.weight_again, w, True)
    grad = quantizers.products.dgrad(dy, weight, out_dtype, out)
    dy.rowwise = None
    return grad


def weight_gradient(
    plan: GemmPlan, saved: tuple, dy: torch.Tensor | None, quantized: QuantizedTensor | None
) -> torch.Tensor | None:
    """``dy.T @ x`` [out, in], or None (a dummy) where it goes into ``main_grad`` or waits.

    ``dy`` [rows, out] is used where the recipe wants this product in high precision.
    """
    return _now_or_later(
        plan.parameter, plan.options, lambda: _weight_gradient(plan, saved, dy, quantized)
    )


def quantized_gradient(
    plan: GemmPlan, dy: torch.Tensor, bias_dtype: torch.dtype | None
) -> tuple[Any, torch.Tensor | None]:
    """The gradient of a GEMM's output ``dy`` [rows, out], quantized, and that of its bias.

    ``bias_dtype`` None: the bias needs none.
    """
    fp8_wgrad = plan.need_weight and not plan.quantizers.high_precision_wgrad
    need_bias = bias_dtype is not None
    quantized: Any = None
    grad_bias: torch.Tensor | None = None
    if plan.need_input or fp8_wgrad:
        quantized, grad_bias = plan.quantizers.grad_output.quantize(
            dy, plan.need_input, fp8_wgrad, need_bias
        )
    elif need_bias:
        grad_bias = dy.sum(0)
    if grad_bias is not None and grad_bias.dtype is not bias_dtype:
        grad_bias = grad_bias.to(bias_dtype)
    return quantized, grad_bias


def plain_weight_gradient(
    parameter: Any,
    dy: torch.Tensor,
    x: torch.Tensor,
    dtype: torch.dtype,
    options: GemmOptions,
) -> torch.Tensor | None:
    """``weight_gradient`` of a GEMM in high precision."""
    return _now_or_later(
        parameter, options, lambda: _plain_wgrad(dy, x, parameter, dtype, options.accumulate)
    )


def _now_or_later(
    parameter: Any, options: GemmOptions, compute: Callable[[], torch.Tensor | None]
) -> torch.Tensor | None:
    """The gradient, or None after handing its computation to ``options.delayed``."""
    if options.delayed is None:
        return compute()

    def later() -> None:
        with torch.no_grad():
            grad = compute()
            if options.accumulate is None and grad is not None:
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)

    options.delayed(later)
    return None


def _weight_gradient(
    plan: GemmPlan, saved: tuple, dy: torch.Tensor | None, quantized: QuantizedTensor | None
) -> torch.Tensor | None:
    x, x_scale, _, _ = saved
    quantizers, options = plan.quantizers, plan.options
    if quantizers.high_precision_wgrad:
        return _plain_wgrad(dy, x, plan.parameter, plan.weight_dtype, options.accumulate)
    assert quantized is not None
    if options.save_original:
        inp = quantizers.input.requantize(x, x_scale)
    else:
        inp = QuantizedTensor(None, None, x, x_scale, quantizers.input.dtype)
    if options.accumulate is None:
        return quantizers.products.wgrad(quantized, inp, plan.weight_dtype)
    main_grad, accumulate = _main_grad(plan.parameter, options.accumulate)
    quantizers.products.wgrad(quantized, inp, main_grad.dtype, main_grad, accumulate)
    return _dummy_gradient(plan.parameter)


def _plain_wgrad(
    dy: Any, x: Any, parameter: Any, dtype: torch.dtype, accumulate: bool | None
) -> torch.Tensor | None:
    """Weight gradient in high precision, returned or put into ``main_grad``."""
    grad = torch.mm(dy.t(), x.to(dy.dtype))
    if accumulate is None:
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
            "fuse_wgrad_accumulation: weight.main_grad must be a preallocated tensor when "
            "fuse_wgrad_accumulation=True, got None"
        )
    if main_grad.numel() != parameter.numel() or not main_grad.is_contiguous():
        raise ValueError(
            f"fuse_wgrad_accumulation: weight.main_grad must be contiguous with shape "
            f"{list(parameter.shape)}, "
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
