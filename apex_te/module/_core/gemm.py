"""Steps of a module's quantized GEMM: forward, the tensors saved for backward, both gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...comm.collectives import Pending
from ...fp8.parameter.parameter import FP8Parameter, dequantized, fp8_operands
from ...fp8.scheme import GemmQuantizers
from ...fp8.scheme.base import FusedCast
from ...fp8.scheme.gemm_backend import DGRAD, FPROP, GemmBackend
from ...fp8.tensor import QuantizedTensor
from .head_layout import HeadLayout
from .tensor_parallel import GatheredRows, Product, TensorParallel

if TYPE_CHECKING:
    from .programs import Programs

SAVED = 4  # tensors that `saved_by` returns for a GEMM

Operand = QuantizedTensor | GatheredRows


class GemmOptions(NamedTuple):
    """Options of one GEMM of a module.

    Attributes:
        accumulate: None returns the weight gradient to autograd, True adds it to ``main_grad``,
            False overwrites ``main_grad``.
        save_original: save the high-precision input for backward instead of its FP8 copy.
        wgrad_store: function that stores a function which will compute the weight gradient; None
            computes it in backward.
        in_ddp: True if DistributedDataParallel runs this forward and waits for gradients.
    """

    accumulate: bool | None = None
    save_original: bool = False
    wgrad_store: Callable[[Callable[[], None]], None] | None = None
    parallel: TensorParallel | None = None
    in_ddp: bool = False


class FP8Call(NamedTuple):
    """Settings of one call of a module, made by ``FP8Module.prepare`` before it computes anything.

    Attributes:
        dtype: the dtype to compute in, and that of the output.
        is_fp8: True if GEMMs run in FP8; False with ``quantizers`` means calibrating, in bf16 or
            fp32.
        quantizers: one for each GEMM; None if nothing is quantized or recorded.
        cached: FP8 copies of each GEMM's weight that are kept after the call; None casts the
            weight.
        fill: None uses no weight cache, True casts all weights into it, False the changed ones.
        programs: the ``Programs`` that may run the call's ops; None calls each op.
        keep_columnwise: save the weight's columnwise copy; False casts the weight again in
            backward.
    """

    dtype: torch.dtype
    is_fp8: bool
    quantizers: tuple[GemmQuantizers, ...] | None
    cached: tuple[QuantizedTensor | None, ...]
    options: tuple[GemmOptions, ...]
    fill: bool | None
    programs: Programs | None = None
    keep_columnwise: bool = False


class GemmPlan(NamedTuple):
    """Everything that the backward of one GEMM needs besides tensors.

    Attributes:
        weight_dtype: dtype of the weight gradient that autograd gets.
        parameter: the weight if backward writes its ``main_grad`` or ``.grad`` itself, else None.
        weight_cached: True if the saved weight is a columnwise copy, not the weight itself.
        shared_input: quantizer that casts this rank's rows of the input with a scale that all ranks
            share, so that FP8 data can be gathered; else None. Chosen in forward, because scales
            may change before backward.
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
    call: FP8Call,
    gemm: int,
    weight: torch.Tensor,
    need_input: bool,
    need_weight: bool,
    keep_columnwise: bool = False,
) -> GemmPlan:
    """Returns the plan of one GEMM of a call; ``keep_columnwise`` requires ``weight_operand``."""
    assert call.quantizers is not None
    quantizers, options = call.quantizers[gemm], call.options[gemm]
    in_place = options.accumulate is not None or options.wgrad_store is not None
    # main_grad is an attribute of this very parameter, which a saved copy could lose.
    parameter = weight if in_place and need_weight else None
    parallel, shared = options.parallel, None
    if parallel is not None and parallel.gathers_input:
        shared = quantizers.input.shared(parallel.group)
    # A weight that is held in FP8 is not cast.
    kept = keep_columnwise and need_input and type(weight) is not FP8Parameter
    return GemmPlan(
        quantizers, need_input, need_weight, weight.dtype, options, parameter,
        call.cached[gemm] is not None or kept, shared,
    )  # fmt: skip


def weight_operand(
    plan: GemmPlan,
    weight: torch.Tensor,
    cached: QuantizedTensor | None,
    heads: HeadLayout | None = None,
) -> tuple[QuantizedTensor | None, bool]:
    """Returns ``(operand, is_sorted)``: the FP8 copies of a weight ``[out, in]`` for fprop.

    ``operand`` is None if ``multiply`` is to cast the weight. With ``plan.weight_cached`` it is
    never None, and has the columnwise copy, with heads in the order of ``weight``. If
    ``is_sorted``, the rowwise copy has all queries, then all keys, then all values.
    """
    quantizers = plan.quantizers
    if heads is None or not heads.needs_sorting:
        if cached is None and plan.weight_cached:
            values = dequantized(weight).contiguous()
            cached = quantizers.weight.quantize(values, True, True)[0]
        return cached, False
    order = (heads.repeats, heads.groups)
    if cached is None and type(weight) is FP8Parameter:
        cached = fp8_operands(weight, quantizers, False)
    if cached is None:
        values = dequantized(weight).contiguous()
        return quantizers.weight.quantize_heads(values, *order, plan.weight_cached)
    by_kind = quantizers.weight.sort_heads(cached, *order)
    return (cached, False) if by_kind is None else (by_kind, True)


def gathers_input(plan: GemmPlan) -> bool:
    """Returns True if this rank has only some rows of the input, and gathers the others."""
    parallel = plan.options.parallel
    return parallel is not None and parallel.gathers_input


def saves_values(plan: GemmPlan) -> bool:
    """Returns True if the input is saved for backward in bf16 or fp32."""
    if not plan.need_weight:
        return False
    if plan.options.save_original or plan.quantizers.high_precision_wgrad:
        return True
    return gathers_input(plan) and plan.shared_input is None


def keeps_input(plan: GemmPlan) -> bool:
    """Returns True if forward makes the columnwise copy of the input for the weight gradient."""
    return plan.need_weight and not saves_values(plan) and not gathers_input(plan)


def quantized_input(
    plan: GemmPlan, source: torch.Tensor | FusedCast
) -> tuple[Operand, QuantizedTensor | None]:
    """Quantizes this rank's rows ``[rows, in]`` of a GEMM's input, a tensor or an op.

    Returns ``(operand, local)``: all ranks' rows for fprop, and this rank's rows for ``saved_by``.
    They are one object if no rows are gathered; ``local`` is None if bf16 or fp32 rows are
    gathered.
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
    c: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes the layer's output ``[..., out]`` with its tensor-parallel collective.

    The output is not a view, because autograd refuses in-place changes of a view made in a
    Function. ``shape`` is that of this rank's input; ``c`` ``[rows, out]`` requires
    ``adds_in_product``.
    """
    quantizers, parallel, features = plan.quantizers, plan.options.parallel, weight.shape[0]
    if parallel is None:
        if len(shape) == 2:
            return multiply(quantizers, x, weight, cached, bias, dtype, None, c)
        out_shape = (*shape[:-1], features)
    else:
        out_shape = parallel.output_shape(shape, features)
    is_whole = parallel is None or parallel.column
    if is_whole and _computes_more_rows(quantizers.backend, x):
        # The GEMM makes room for them; resizing keeps it and makes no view.
        return multiply(quantizers, x, weight, cached, bias, dtype, None, c).resize_(out_shape)
    out = torch.empty(out_shape, dtype=dtype, device=weight.device)
    if is_whole:
        multiply(quantizers, x, weight, cached, bias, dtype, _flat(out), c)
        return out
    assert parallel is not None
    assert isinstance(x, QuantizedTensor)
    assert x.rowwise is not None
    if cached is None:
        cached = quantized_weight(quantizers, quantizers.weight, weight, False)

    product = _product_of_rows(quantizers.backend, FPROP, x, cached, dtype)
    out = parallel.reduced_output(product, x.rowwise.shape[0], out, has_one_scale(x))
    return plus_bias(out, bias)


def _computes_more_rows(backend: GemmBackend, x: Operand) -> bool:
    """Returns True if ``backend`` rounds up the rows of ``x`` to a multiple that it computes."""
    if not isinstance(x, QuantizedTensor) or torch.compiler.is_compiling():
        return False
    assert x.rowwise is not None
    return x.rowwise.shape[0] % backend.row_multiple != 0


def adds_in_product(call: FP8Call, gemm: int, c: torch.Tensor) -> bool:
    """Returns True if a GEMM can add ``c``, in the output's shape, before it rounds the sum."""
    if not call.is_fp8 or c.dtype is not call.dtype or call.options[gemm].parallel is not None:
        return False
    assert call.quantizers is not None
    return call.quantizers[gemm].backend.adds and c.is_contiguous()


def plus_bias(out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Adds ``bias`` [out] to an output already reduced over ranks, in place in eager mode.

    In a graph the sum is a new tensor: torch 2.11 loses the gradient of a Function's result that is
    changed in place.
    """
    if bias is None:
        return out
    return out + bias if torch.compiler.is_compiling() else out.add_(bias)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Views ``x`` [..., n] as a matrix [rows, n]."""
    return x.view(math.prod(x.shape[:-1]), x.shape[-1])


def multiply(
    quantizers: GemmQuantizers,
    x: Operand,
    weight: torch.Tensor,
    cached: QuantizedTensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes ``x @ weight.T + bias + c`` [rows, out], written to ``out`` if that is given.

    ``cached=None`` quantizes ``weight`` here; ``c`` [rows, out] requires ``adds_in_product``.
    """
    if cached is None:
        cached = quantized_weight(quantizers, quantizers.weight, weight, False)
    backend, operand = quantizers.backend, cached
    if isinstance(x, QuantizedTensor):
        return backend.fprop(x, operand, out_dtype, bias, out, c)
    if out is None:
        out = torch.empty(x.rows, weight.shape[0], dtype=out_dtype, device=weight.device)
    return x.multiplied(backend.bound(FPROP, operand, out_dtype, bias), out)


def quantized_weight(
    quantizers: GemmQuantizers, quantizer: Any, weight: torch.Tensor, columnwise: bool
) -> QuantizedTensor:
    """Returns one FP8 copy of a weight: the data of an ``FP8Parameter`` if they fit, or a cast."""
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
    """Returns ``(input, input_scale, weight, weight_scale)`` for backward, each None if not needed.

    ``input`` is the columnwise FP8 data ``[in, rows]``; or this rank's rowwise data ``[rows, in]``
    if rows are gathered; or ``x``, with the scale of backward's cast, if any. ``weight`` is the
    columnwise data ``[in, out]``, or the weight itself, without a scale, for backward to cast
    again.
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
        if plan.weight_cached:
            assert cached is not None
            saved_w, w_scale = cached.columnwise, cached.columnwise_scale_inv
        else:
            saved_w = weight
    return saved_x, x_scale, saved_w, w_scale


def start_saved_input(plan: GemmPlan, saved: tuple) -> Pending | None:
    """Begins to gather the saved input's rows for wgrad; None if there is nothing to gather."""
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
    c: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes ``dy @ weight + c`` [rows, in] of this rank, without a reduction over ranks.

    Frees the rowwise copy of ``dy``; wgrad may then reuse its memory. ``c`` has ``out_dtype``, and
    requires that the backend ``adds`` and that rows are not gathered.
    """
    weight, backend = weight_recast(plan, saved), plan.quantizers.backend
    if isinstance(dy, QuantizedTensor):
        grad = backend.dgrad(dy, weight, out_dtype, out, c)
        dy.rowwise = None
        return grad
    assert weight.columnwise is not None
    if out is None:
        cols, device = weight.columnwise.shape[0], weight.columnwise.device
        out = torch.empty(dy.rows, cols, dtype=out_dtype, device=device)
    return dy.multiplied(backend.bound(DGRAD, weight, out_dtype), out)


def reduced_input_gradient(
    plan: GemmPlan, saved: tuple, dy: Operand, out_dtype: torch.dtype
) -> tuple[torch.Tensor | None, Pending | None]:
    """Computes the input's gradient ``[rows, in]``, and begins to sum it over ranks if needed.

    Returns ``(gradient, None)`` if no sum is needed, else ``(None, pending)``.
    """
    parallel = plan.options.parallel
    if parallel is None or not parallel.column:
        return input_gradient(plan, saved, dy, out_dtype), None
    assert isinstance(dy, QuantizedTensor)
    assert dy.rowwise is not None
    weight, backend = weight_recast(plan, saved), plan.quantizers.backend
    assert weight.columnwise is not None

    product = _product_of_rows(backend, DGRAD, dy, weight, out_dtype)
    rows, cols = dy.rowwise.shape[0], weight.columnwise.shape[0]
    like = torch.empty(0, cols, dtype=out_dtype, device=dy.rowwise.device)
    pending = parallel.start_input_gradient(product, rows, like, has_one_scale(dy))
    dy.rowwise = None
    return None, pending


def weight_recast(plan: GemmPlan, saved: tuple) -> QuantizedTensor:
    """Returns the weight's columnwise copy: the saved copy, or a cast of the saved weight."""
    _, _, w, w_scale = saved
    quantizers = plan.quantizers
    if plan.weight_cached:
        return QuantizedTensor(None, None, w, w_scale, quantizers.weight.dtype)
    return quantized_weight(quantizers, quantizers.weight_recast, w, True)


def has_one_scale(x: QuantizedTensor) -> bool:
    """Returns True if ``x`` has a single scale, so that a GEMM can read some of its rows."""
    return x.rowwise_scale_inv is not None and x.rowwise_scale_inv.numel() == 1


def _product_of_rows(
    backend: GemmBackend,
    which: int,
    x: QuantizedTensor,
    weight: QuantizedTensor,
    out_dtype: torch.dtype,
) -> Product:
    """Returns the function that multiplies rows of ``x``; slices only if it has one scale."""
    fp8_data, scale_inv = x.rowwise, x.rowwise_scale_inv
    assert fp8_data is not None
    every = fp8_data.shape[0]
    bound: Any = None

    def product(rows: slice, into: torch.Tensor | None) -> torch.Tensor:
        nonlocal bound
        if into is None or rows.stop - rows.start == every:
            if which == FPROP:
                return backend.fprop(x, weight, out_dtype, None, into)
            return backend.dgrad(x, weight, out_dtype, into)
        if bound is None:
            bound = backend.bound(which, weight, out_dtype)
        return bound(fp8_data[rows], scale_inv, into)

    return product


def quantized_gradient(
    plan: GemmPlan, dy: torch.Tensor | FusedCast, bias_dtype: torch.dtype | None
) -> tuple[Any, torch.Tensor | None, Any]:
    """Quantizes the gradient ``[rows, out]`` of a GEMM's output, and sums its columns for the bias.

    Returns ``(quantized, grad_bias, dy)``, each None if not needed; ``dy`` is also None if the op
    wrote only FP8. ``dy`` has all ranks' rows if rows are split and wgrad runs in bf16 or fp32.
    """
    quantizers, parallel = plan.quantizers, plan.options.parallel
    fp8_wgrad = plan.need_weight and not quantizers.high_precision_wgrad
    need_bias = bias_dtype is not None
    quantized: Any = None
    grad_bias: torch.Tensor | None = None
    gathers = parallel is not None and parallel.gathers_gradient
    if not isinstance(dy, torch.Tensor):
        if not gathers and (fp8_wgrad or (plan.need_input and not plan.need_weight)):
            dy.with_dbias = need_bias
            quantized = quantizers.grad_output.produce(dy, plan.need_input, fp8_wgrad)
            return quantized, cast_to(dy.dbias, bias_dtype), None
        dy = dy.plain()
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
    return quantized, cast_to(grad_bias, bias_dtype), dy


def cast_to(x: Any, dtype: torch.dtype | None) -> Any:
    """Returns ``x`` in ``dtype``, or ``x`` itself if it has this dtype; None for None."""
    return x if x is None or x.dtype is dtype else x.to(dtype)
