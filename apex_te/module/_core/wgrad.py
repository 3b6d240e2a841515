"""Weight gradient of a GEMM: returned to autograd or put into ``main_grad``, at once or delayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from ...comm.collectives import Pending
from ...fp8.tensor import QuantizedTensor
from ...ops.byte_transpose import byte_transpose
from ...ops.wgrad_gemm import wgrad_gemm
from .gemm import GemmOptions, GemmPlan, Operand, saves_values
from .tensor_parallel import GatheredRows

_dummies: dict[tuple, torch.Tensor] = {}


def weight_gradient(
    plan: GemmPlan,
    saved: tuple,
    dy: torch.Tensor | None,
    quantized: Operand | None,
    gathered: Pending | None = None,
) -> torch.Tensor | None:
    """Computes ``dy.T @ x`` [out, in] now, or passes the computation to ``wgrad_store``.

    Reads ``dy`` if wgrad runs in bf16 or fp32, else ``quantized``. Returns None or
    ``dummy_gradient`` if the gradient went into ``main_grad`` or is delayed.
    """
    operand = quantized.arrived(False) if isinstance(quantized, GatheredRows) else quantized
    if plan.parameter is not None and not is_wanted(plan.parameter):
        if gathered is not None:
            gathered.borrow()
            gathered.release()
        return None
    return _now_or_later(
        plan.parameter, plan.options, lambda: _weight_gradient(plan, saved, dy, operand, gathered)
    )


def plain_weight_gradient(
    parameter: Any,
    dy: torch.Tensor,
    x: torch.Tensor,
    dtype: torch.dtype,
    options: GemmOptions,
) -> torch.Tensor | None:
    """Computes ``dy.T @ x`` [out, in] in bf16 or fp32, now or later by ``wgrad_store``.

    Returns what ``weight_gradient`` returns.
    """
    in_place = options.accumulate is not None or options.wgrad_store is not None
    if in_place and not is_wanted(parameter):
        return None
    return _now_or_later(parameter, options, lambda: _plain_wgrad(dy, x, parameter, dtype, options))


def is_wanted(parameter: torch.Tensor) -> bool:
    """Returns True unless the running backward does not need the gradient of this weight.

    ``torch.autograd.grad`` of a layer's input, as pipeline schedules call it, runs the whole
    backward. Autograd drops the gradients that were not requested; they must not be added to
    ``main_grad`` or delayed either.
    """
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
        return True
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    except RuntimeError:  # what torch says of a leaf that ``torch.autograd.grad`` was asked for
        return True


def _now_or_later(
    parameter: Any, options: GemmOptions, compute: Callable[[], torch.Tensor | None]
) -> torch.Tensor | None:
    """Returns ``compute()``, or None after passing it to ``options.wgrad_store``.

    A delayed gradient that does not go into ``main_grad`` is added to ``parameter.grad``.
    """
    if options.wgrad_store is None:
        return compute()

    def later() -> None:
        with torch.no_grad():
            grad = compute()
            if options.accumulate is None and grad is not None:
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)

    options.wgrad_store(later)
    return None


def _weight_gradient(
    plan: GemmPlan,
    saved: tuple,
    dy: torch.Tensor | None,
    quantized: QuantizedTensor | None,
    gathered: Pending | None,
) -> torch.Tensor | None:
    if gathered is None:
        return _of_rows(plan, saved[0], saved[1], dy, quantized, False)
    grad = _of_rows(plan, gathered.borrow(), saved[1], dy, quantized, True)
    gathered.release()
    return grad


def _of_rows(
    plan: GemmPlan,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    dy: torch.Tensor | None,
    quantized: QuantizedTensor | None,
    rowwise: bool,
) -> torch.Tensor | None:
    """Computes the weight gradient from the saved input, with the rows of all ranks."""
    quantizers, options = plan.quantizers, plan.options
    if quantizers.high_precision_wgrad:
        return _plain_wgrad(dy, x, plan.parameter, plan.weight_dtype, options)
    assert quantized is not None
    if saves_values(plan):
        inp = quantizers.input.requantize(x, x_scale)
    else:
        columnwise = x
        if rowwise:
            columnwise = byte_transpose(x, pad_columnwise=quantizers.input.pad_columnwise)
        inp = QuantizedTensor(None, None, columnwise, x_scale, quantizers.input.dtype)
    if options.accumulate is None:
        return quantizers.backend.wgrad(quantized, inp, plan.weight_dtype)
    main_grad, accumulate = main_grad_of(plan.parameter, options)
    quantizers.backend.wgrad(quantized, inp, main_grad.dtype, main_grad, accumulate)
    return dummy_gradient(plan.parameter)


def _plain_wgrad(
    dy: Any, x: Any, parameter: Any, dtype: torch.dtype, options: GemmOptions
) -> torch.Tensor | None:
    """Computes the weight gradient in bf16 or fp32, for autograd or into ``main_grad``."""
    x = x.to(dy.dtype)
    if options.accumulate is None:
        return torch.mm(dy.t(), x).to(dtype)
    main_grad, accumulate = main_grad_of(parameter, options)
    wgrad_gemm(dy, x, main_grad, accumulate=accumulate)
    return dummy_gradient(parameter)


def main_grad_of(parameter: Any, options: GemmOptions) -> tuple[torch.Tensor, bool]:
    """Returns a weight's gradient buffer, and True to add to it or False to overwrite it."""
    get_main_grad = getattr(parameter, "get_main_grad", None)
    if options.in_ddp and get_main_grad is None:
        _check_owner(parameter)
    if get_main_grad is not None:
        main_grad = get_main_grad()
    else:
        main_grad = getattr(parameter, "main_grad", None)
    if not isinstance(main_grad, torch.Tensor):
        got = "None" if main_grad is None else type(main_grad).__name__
        raise ValueError(
            "fuse_wgrad_accumulation: weight.main_grad must be a preallocated tensor when "
            f"fuse_wgrad_accumulation=True, got {got} (under fully_shard, whose weights have no "
            "main_grad, use fuse_wgrad_accumulation=False or weights with get_main_grad())"
        )
    if main_grad.numel() != parameter.numel() or not main_grad.is_contiguous():
        raise ValueError(
            f"fuse_wgrad_accumulation: weight.main_grad must be contiguous with shape "
            f"{list(parameter.shape)}, "
            f"got {list(main_grad.shape)}"
        )
    accumulate = options.accumulate is True and not getattr(parameter, "overwrite_main_grad", False)
    return main_grad.view(parameter.shape), accumulate


def _check_owner(parameter: Any) -> None:
    """Checks that DistributedDataParallel waits for no gradient that only ``main_grad`` gets."""
    if hasattr(parameter, "grad_added_to_main_grad") or hasattr(parameter, "_ddp_ignored"):
        return
    raise ValueError(
        "fuse_wgrad_accumulation: fuse_wgrad_accumulation must be False under "
        "DistributedDataParallel, which does not reduce weight.main_grad, got True. Else have it "
        "reduced by "
        "apex_te.distributed.reduce_main_grads after backward, and let DistributedDataParallel "
        "ignore the weight (_set_params_and_buffers_to_ignore_for_model, before wrapping) or "
        "reduce a dummy gradient of it (set weight.grad_added_to_main_grad = False), got neither"
    )


def dummy_gradient(parameter: Any) -> torch.Tensor | None:
    """Returns the gradient that autograd gets for a weight whose gradient is in ``main_grad``.

    It is None, or a dummy that runs gradient hooks if the weight has ``grad_added_to_main_grad``,
    which is set to True. Weights of one shape, dtype and device share the dummy's memory.
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
