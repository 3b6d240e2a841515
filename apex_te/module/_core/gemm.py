"""The steps of one quantized GEMM of a module: forward, what it saves, and its two gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...comm.collectives import Pending
from ...fp8.parameter.parameter import FP8Parameter, dequantized, fp8_operands
from ...fp8.scheme import GemmQuantizers
from ...fp8.scheme.base import FusedCast
from ...fp8.tensor import QuantizedTensor
from .tensor_parallel import GatheredCodes, TensorParallel

__all__ = [
    "FP8Call",
    "GemmOptions",
    "GemmPlan",
    "as_matrix",
    "gathers_input",
    "gemm_plan",
    "input_gradient",
    "keeps_input",
    "multiply",
    "plus_bias",
    "quantized_gradient",
    "quantized_input",
    "reduced_input_gradient",
    "saved_by",
    "saves_values",
    "shaped_product",
    "start_saved_input",
]

SAVED = 4  # tensors that `saved_by` gives

Operand = QuantizedTensor | GatheredCodes


class GemmOptions(NamedTuple):
    """Options of one GEMM.

    Attributes:
        accumulate: None makes ``weight.grad``; True adds to ``weight.main_grad``, False overwrites
            it.
        save_original: save the input as it came instead of its FP8 copy.
        wgrad_store: takes the computation of the weight gradient, to be run later.
        parallel: the collectives around the GEMM.
        in_ddp: DistributedDataParallel runs this forward and waits for gradients.
    """

    accumulate: bool | None = None
    save_original: bool = False
    wgrad_store: Callable[[Callable[[], None]], None] | None = None
    parallel: TensorParallel | None = None
    in_ddp: bool = False


class FP8Call(NamedTuple):
    """Everything that one call of a module computes with besides its tensors.

    ``FP8Module.prepare`` makes it, once for each call.

    Attributes:
        dtype: the dtype to compute in, and that of the output.
        is_fp8: the GEMMs run in FP8; else ``quantizers`` only note amaxes (calibration).
        quantizers: of each GEMM; None where nothing is quantized or noted.
        cached: the kept FP8 copies of each GEMM's weight; None where the GEMM makes its own.
        options: of each GEMM.
        fill: None keeps no FP8 weights, True makes the kept ones anew, False those that changed.
    """

    dtype: torch.dtype
    is_fp8: bool
    quantizers: tuple[GemmQuantizers, ...] | None
    cached: tuple[QuantizedTensor | None, ...]
    options: tuple[GemmOptions, ...]
    fill: bool | None


class GemmPlan(NamedTuple):
    """Everything that the backward of one GEMM needs besides tensors.

    Attributes:
        parameter: the weight whose ``main_grad`` or ``.grad`` backward writes itself, else None.
        shared_input: quantizes rows of the input with a scale that all ranks have, so that FP8 data
            are gathered; None where values are gathered, or nothing. Asked once, in forward:
            scales may move until backward.
    """

    quantizers: GemmQuantizers
    need_input: bool
    need_weight: bool
    weight_dtype: torch.dtype
    options: GemmOptions
    parameter: Any
    weight_cached: bool
    shared_input: Any


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """Returns ``x`` [..., n] as a contiguous matrix [rows, n]; 0 rows are allowed."""
    if x.dim() != 2:
        x = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return x.contiguous()


def gemm_plan(
    call: FP8Call, gemm: int, weight: torch.Tensor, need_input: bool, need_weight: bool
) -> GemmPlan:
    """Returns the plan of a call's GEMM number ``gemm``, whose gradients are needed as given."""
    assert call.quantizers is not None
    quantizers, options = call.quantizers[gemm], call.options[gemm]
    in_place = options.accumulate is not None or options.wgrad_store is not None
    # main_grad is an attribute of this very parameter, which a saved copy could lose.
    parameter = weight if in_place and need_weight else None
    parallel, shared = options.parallel, None
    if parallel is not None and parallel.gathers_input:
        shared = quantizers.input.shared(parallel.group)
    return GemmPlan(
        quantizers, need_input, need_weight, weight.dtype, options, parameter,
        call.cached[gemm] is not None, shared,
    )  # fmt: skip


def gathers_input(plan: GemmPlan) -> bool:
    """Returns True if this rank has only some rows of the input."""
    parallel = plan.options.parallel
    return parallel is not None and parallel.gathers_input


def saves_values(plan: GemmPlan) -> bool:
    """Returns True if backward needs the input in high precision."""
    if not plan.need_weight:
        return False
    if plan.options.save_original or plan.quantizers.high_precision_wgrad:
        return True
    return gathers_input(plan) and plan.shared_input is None


def keeps_input(plan: GemmPlan) -> bool:
    """Returns True if forward makes the columnwise copy of the input, which backward needs."""
    return plan.need_weight and not saves_values(plan) and not gathers_input(plan)


def quantized_input(
    plan: GemmPlan, source: torch.Tensor | FusedCast
) -> tuple[Operand, QuantizedTensor | None]:
    """Quantizes ``source``, a matrix [rows, in] or the op that makes it.

    Returns:
        ``(operand, part)``: the operand of the product, and what ``saved_by`` saves of it, which is
        this rank's rows where the operand was gathered as FP8 data, else the operand.
    """
    parallel = plan.options.parallel
    if parallel is not None and parallel.gathers_input:
        quantized, local = parallel.gathered_input(plan.quantizers.input, plan.shared_input, source)
        return quantized, local
    keep = keeps_input(plan)
    if isinstance(source, torch.Tensor):
        quantized = plan.quantizers.input.quantize(source, True, keep)[0]
    else:
        quantized = plan.quantizers.input.produce(source, True, keep)
    return quantized, quantized


def shaped_product(
    plan: GemmPlan,
    x: Operand,
    weight: torch.Tensor,
    cached: QuantizedTensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> torch.Tensor:
    """Computes the layer's output [..., out] for an input of ``shape``, collective included.

    The output is no view: autograd refuses to change a view made in a Function in place.
    """
    quantizers, parallel, features = plan.quantizers, plan.options.parallel, weight.shape[0]
    if parallel is None:
        if len(shape) == 2:
            return multiply(quantizers, x, weight, cached, bias, dtype)
        out = torch.empty(*shape[:-1], features, dtype=dtype, device=weight.device)
        multiply(quantizers, x, weight, cached, bias, dtype, _flat(out))
        return out
    out = torch.empty(parallel.output_shape(shape, features), dtype=dtype, device=weight.device)
    if parallel.column:
        multiply(quantizers, x, weight, cached, bias, dtype, _flat(out))
        return out
    assert isinstance(x, QuantizedTensor)
    assert x.rowwise is not None
    if cached is None:
        cached = _quantized_weight(quantizers, quantizers.weight, weight, False)

    def product(rows: slice, into: torch.Tensor | None) -> torch.Tensor:
        return quantizers.backend.fprop(rows_of(x, rows), cached, dtype, None, into)

    out = parallel.reduced_output(product, x.rowwise.shape[0], out, has_one_scale(x))
    return plus_bias(out, bias)


def plus_bias(out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Adds the bias to a reduced output ``out``, in place: once, not once a rank.

    In a graph the sum is a new tensor: torch 2.11 loses the gradient of a Function's result that is
    changed in place.
    """
    if bias is None:
        return out
    return out + bias if torch.compiler.is_compiling() else out.add_(bias)


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.view(math.prod(x.shape[:-1]), x.shape[-1])


def multiply(
    quantizers: GemmQuantizers,
    x: Operand,
    weight: torch.Tensor,
    cached: QuantizedTensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes ``x @ weight.T + bias`` [rows, out]; quantizes the weight unless ``cached``."""
    if cached is None:
        cached = _quantized_weight(quantizers, quantizers.weight, weight, False)
    backend, operand = quantizers.backend, cached
    if isinstance(x, QuantizedTensor):
        return backend.fprop(x, operand, out_dtype, bias, out)
    if out is None:
        out = torch.empty(x.rows, weight.shape[0], dtype=out_dtype, device=weight.device)
    return x.multiplied(
        lambda piece, into: backend.fprop(piece, operand, out_dtype, bias, into), out
    )


def _quantized_weight(
    quantizers: GemmQuantizers, quantizer: Any, weight: torch.Tensor, columnwise: bool
) -> QuantizedTensor:
    """Returns one FP8 copy of a weight: the one that it holds if it fits, else a new one."""
    if type(weight) is FP8Parameter:
        held = fp8_operands(weight, quantizers, columnwise)
        if held is not None:
            return held
    weight = dequantized(weight).contiguous()
    return quantizer.quantize(weight, not columnwise, columnwise)[0]


def saved_by(
    plan: GemmPlan,
    x: torch.Tensor | None,
    part: QuantizedTensor | None,
    weight: torch.Tensor,
    cached: QuantizedTensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """Returns the tensors that backward saves of the input and the weight, ``SAVED`` of them.

    Of the input, its columnwise FP8 copy, this rank's FP8 rows (``part``) where rows are gathered,
    or ``x`` where backward needs values. Of the weight, the cached columnwise copy, or the weight
    itself, which is recast in backward.

    Returns:
        ``(input, scale_inv of the input, weight, scale_inv of the weight)``, each or None.
    """
    saved_x = saved_w = x_scale = w_scale = None
    if plan.need_weight:
        if saves_values(plan):
            saved_x = x
            if not plan.quantizers.high_precision_wgrad:
                x_scale = plan.quantizers.input.snapshot()
        elif gathers_input(plan):
            assert part is not None
            saved_x, x_scale = part.rowwise, part.rowwise_scale_inv
        else:
            assert part is not None
            saved_x, x_scale = part.columnwise, part.columnwise_scale_inv
    if plan.need_input:
        if cached is None:
            saved_w = weight
        else:
            saved_w, w_scale = cached.columnwise, cached.columnwise_scale_inv
    return saved_x, x_scale, saved_w, w_scale


def start_saved_input(plan: GemmPlan, saved: tuple) -> Pending | None:
    """Begins to gather the input's rows for ``weight_gradient``; None if this rank has them all."""
    if not plan.need_weight or not gathers_input(plan):
        return None
    assert plan.options.parallel is not None
    # A gather that is read much later would keep others from the peers' memory.
    gather = plan.options.parallel.gathered_rows
    return gather(saved[0], late=plan.options.wgrad_store is not None)


def input_gradient(
    plan: GemmPlan,
    saved: tuple,
    dy: Operand,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes ``dy @ weight`` [rows, in] of this rank; ``saved`` is what ``saved_by`` gave.

    Frees the rowwise copy of ``dy``, whose memory the weight gradient may then have.
    """
    weight, backend = _weight_recast(plan, saved), plan.quantizers.backend
    if isinstance(dy, QuantizedTensor):
        grad = backend.dgrad(dy, weight, out_dtype, out)
        dy.rowwise = None
        return grad
    assert weight.columnwise is not None
    if out is None:
        cols, device = weight.columnwise.shape[0], weight.columnwise.device
        out = torch.empty(dy.rows, cols, dtype=out_dtype, device=device)
    return dy.multiplied(lambda piece, into: backend.dgrad(piece, weight, out_dtype, into), out)


def reduced_input_gradient(
    plan: GemmPlan, saved: tuple, dy: Operand, out_dtype: torch.dtype
) -> tuple[torch.Tensor | None, Pending | None]:
    """Computes ``input_gradient``, and begins to add it up where ranks have parts of it.

    Returns:
        ``(gradient, None)``, or ``(None, pending)``, whose ``wait()`` gives the gradient.
    """
    parallel = plan.options.parallel
    if parallel is None or not parallel.column:
        return input_gradient(plan, saved, dy, out_dtype), None
    assert isinstance(dy, QuantizedTensor)
    assert dy.rowwise is not None
    weight, backend = _weight_recast(plan, saved), plan.quantizers.backend
    assert weight.columnwise is not None

    def product(rows: slice, into: torch.Tensor | None) -> torch.Tensor:
        return backend.dgrad(rows_of(dy, rows), weight, out_dtype, into)

    rows, cols = dy.rowwise.shape[0], weight.columnwise.shape[0]
    like = torch.empty(0, cols, dtype=out_dtype, device=dy.rowwise.device)
    pending = parallel.start_input_gradient(product, rows, like, has_one_scale(dy))
    dy.rowwise = None
    return None, pending


def _weight_recast(plan: GemmPlan, saved: tuple) -> QuantizedTensor:
    """Returns the columnwise copy of the weight: the cached one, else a recast of the weight."""
    _, _, w, w_scale = saved
    quantizers = plan.quantizers
    if plan.weight_cached:
        return QuantizedTensor(None, None, w, w_scale, quantizers.weight.dtype)
    return _quantized_weight(quantizers, quantizers.weight_recast, w, True)


def has_one_scale(x: QuantizedTensor) -> bool:
    """Returns True if ``x`` has one scale, so that any of its rows can be multiplied alone."""
    return x.rowwise_scale_inv is not None and x.rowwise_scale_inv.numel() == 1


def rows_of(x: QuantizedTensor, rows: slice) -> QuantizedTensor:
    """Returns rows of the rowwise copy of ``x``: all of them, or some if ``has_one_scale(x)``."""
    assert x.rowwise is not None
    if rows.stop - rows.start == x.rowwise.shape[0]:
        return x
    return QuantizedTensor(x.rowwise[rows], x.rowwise_scale_inv, None, None, x.dtype)


def quantized_gradient(
    plan: GemmPlan, dy: torch.Tensor, bias_dtype: torch.dtype | None
) -> tuple[Any, torch.Tensor | None, torch.Tensor]:
    """Quantizes the gradient of a GEMM's output ``dy`` [rows, out].

    Returns:
        ``(quantized, grad_bias, dy)``: the FP8 gradient; that of the bias in ``bias_dtype``, None
        without one; ``dy``, with the rows of all ranks where the weight gradient needs them.
    """
    quantizers, parallel = plan.quantizers, plan.options.parallel
    fp8_wgrad = plan.need_weight and not quantizers.high_precision_wgrad
    need_bias = bias_dtype is not None
    quantized: Any = None
    grad_bias: torch.Tensor | None = None
    if parallel is not None and parallel.gathers_gradient:
        if plan.need_weight and not fp8_wgrad:
            grad_bias = dy.sum(0) if need_bias else None
            dy = parallel.gathered_rows(dy).wait()
            if plan.need_input:
                quantized = quantizers.grad_output.quantize(dy, True, False)[0]
        elif plan.need_input or fp8_wgrad:
            quantized, grad_bias = parallel.quantized_gradient(
                quantizers, dy, plan.need_input, fp8_wgrad, need_bias
            )
        elif need_bias:
            grad_bias = dy.sum(0)
    elif plan.need_input or fp8_wgrad:
        quantized, grad_bias = quantizers.grad_output.quantize(
            dy, plan.need_input, fp8_wgrad, need_bias
        )
    elif need_bias:
        grad_bias = dy.sum(0)
    if grad_bias is not None and grad_bias.dtype is not bias_dtype:
        grad_bias = grad_bias.to(bias_dtype)
    return quantized, grad_bias, dy
