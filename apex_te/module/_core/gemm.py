"""Steps of a module's quantized GEMM: forward, saved tensors, input and weight gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge

from ...comm.collectives import Pending
from ...fp8.parameter.operands import dequantized, fp8_operands
from ...fp8.parameter.parameter import FP8Parameter
from ...fp8.scheme import GemmQuantizers
from ...fp8.scheme.base import FusedCast
from ...fp8.scheme.gemm_backend import DGRAD, FPROP, GemmBackend
from ...fp8.tensor import QuantizedTensor
from ...ops.byte_transpose import byte_transpose
from ...ops.wgrad_gemm import wgrad_gemm
from .heads import HeadLayout
from .named_operands import input_values, plain_product, weight_values
from .tensor_parallel import GatheredRows, Product, TensorParallel

if TYPE_CHECKING:
    from .programs import Programs

SAVED = 4  # tensors that `saved_by` returns for a GEMM

Operand = QuantizedTensor | GatheredRows
# Of backward: with another ``backward`` of the recipe a gradient is not quantized.
Gradient = Operand | torch.Tensor


class GemmOptions(NamedTuple):
    """Options of one GEMM of a module.

    Attributes:
        accumulate: None returns the weight gradient to autograd, True adds it to ``main_grad``,
            False overwrites ``main_grad``.
        save_original: save the high-precision input for backward instead of its FP8 copy.
        wgrad_store: function that stores a function which will compute the weight gradient; None
            computes it in backward.
        in_ddp: True if DistributedDataParallel runs this forward and waits for gradients.
        independent_rows: forward gives a row equal bits whatever the other rows are.
    """

    accumulate: bool | None = None
    save_original: bool = False
    wgrad_store: Callable[[Callable[[], None]], None] | None = None
    parallel: TensorParallel | None = None
    in_ddp: bool = False
    independent_rows: bool = False


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
        small: save what ``fp8_autocast(save="small")`` does.
    """

    dtype: torch.dtype
    is_fp8: bool
    quantizers: tuple[GemmQuantizers, ...] | None
    cached: tuple[QuantizedTensor | None, ...]
    options: tuple[GemmOptions, ...]
    fill: bool | None
    programs: Programs | None = None
    keep_columnwise: bool = False
    small: bool = False

    def gemm(
        self,
        index: int,
        weight: torch.Tensor,
        need_input: bool,
        need_weight: bool,
        keep_columnwise: bool = False,
        has_source: bool = False,
    ) -> GemmCall:
        """Returns the call of one GEMM; ``keep_columnwise`` requires its ``cast_weight``.

        ``has_source`` says that backward can compute the input again, for ``GemmCall.remade``.
        """
        assert self.quantizers is not None
        quantizers, options = self.quantizers[index], self.options[index]
        in_place = options.accumulate is not None or options.wgrad_store is not None
        # main_grad is an attribute of this very parameter, which a saved copy could lose.
        parameter = weight if in_place and need_weight else None
        parallel, shared, gathers = options.parallel, None, False
        if parallel is not None and parallel.gathers_input:
            shared, gathers = quantizers.input.shared(parallel.group), True
        decodes = quantizers.backward == "dequantized"
        rounds = (options.save_original or quantizers.high_precision_wgrad) and not decodes
        saves = need_weight and (rounds or (gathers and shared is None))
        keeps = need_weight and not (saves or gathers or decodes)
        remakes = self.small and has_source and (saves or keeps)
        # A weight that is held in FP8 is not cast.
        kept = keep_columnwise and need_input and type(weight) is not FP8Parameter
        cached = (self.cached[index] is not None or kept) and quantizers.backward is None
        return GemmCall(
            quantizers, need_input, need_weight, weight.dtype, options, parameter, cached, shared,
            gathers, saves, keeps, remakes, rounds,
        )  # fmt: skip


class GemmCall(NamedTuple):
    """One GEMM of a call: its casts, its three products, and what backward needs besides tensors.

    Attributes:
        weight_dtype: dtype of the weight gradient that autograd gets.
        parameter: the weight if backward writes its ``main_grad`` or ``.grad`` itself, else None.
        weight_cached: True if the saved weight is a columnwise copy, not the weight itself.
        shared_input: quantizer that casts this rank's rows of the input with a scale that all ranks
            share, so that FP8 data can be gathered; else None. Chosen in forward, because scales
            may change before backward.
        gathers_input: True if this rank has only some rows of the input, and gathers the others.
        saves_values: True if the input is saved for backward in bf16 or fp32.
        keeps_input: True if forward makes the input's columnwise copy for the weight gradient.
        remakes_input: True if only the scale of the input is saved, and ``remade`` makes the rest.
        rounds_input: True if an op's result is rounded to bf16 before its cast, as a call that
            saves it must: calls without gradients compute the same bits.
    """

    quantizers: GemmQuantizers
    need_input: bool
    need_weight: bool
    weight_dtype: torch.dtype
    options: GemmOptions
    parameter: Any
    weight_cached: bool
    shared_input: Any
    gathers_input: bool
    saves_values: bool
    keeps_input: bool
    remakes_input: bool = False
    rounds_input: bool = False

    def cast_input(
        self, source: torch.Tensor | FusedCast
    ) -> tuple[Operand, QuantizedTensor | None]:
        """Quantizes this rank's rows ``[rows, in]`` of the input, a tensor or an op.

        Returns ``(operand, local)``: all ranks' rows for fprop, and this rank's rows for ``saved``.
        They are one object if no rows are gathered; ``local`` is None if bf16 or fp32 rows are
        gathered.
        """
        parallel = self.options.parallel
        if parallel is not None and parallel.gathers_input:
            quantized, local = parallel.gathered_input(
                self.quantizers.input, self.shared_input, source
            )
            return quantized, local
        if isinstance(source, torch.Tensor):
            quantized = self.quantizers.input.quantize(source, True, self.keeps_input)[0]
        else:
            quantized = self.quantizers.input.produce(source, True, self.keeps_input)
        return quantized, quantized

    def cast_weight(
        self,
        weight: torch.Tensor,
        cached: QuantizedTensor | None,
        heads: HeadLayout | None = None,
    ) -> tuple[QuantizedTensor | None, bool]:
        """Returns ``(operand, is_sorted)``: the FP8 copies of a weight ``[out, in]`` for fprop.

        ``operand`` is None if ``multiply`` is to cast the weight: neither is it cached, nor does
        backward use the amax that its cast finds. With ``weight_cached`` it is
        never None, and has the columnwise copy, with heads in the order of ``weight``. If
        ``is_sorted``, the rowwise copy has all queries, then all keys, then all values.
        """
        quantizers = self.quantizers
        if heads is None or not heads.needs_sorting:
            if cached is None and self.weight_cached:
                values = dequantized(weight).contiguous()
                cached = quantizers.weight.quantize(values, True, True)[0]
            if cached is None and self.recasts_weight(weight):
                cached = quantized_weight(quantizers, quantizers.weight, weight, False)
            return cached, False
        order = (heads.repeats, heads.groups)
        if cached is None and type(weight) is FP8Parameter:
            cached = fp8_operands(weight, quantizers, False)
        if cached is None:
            values = dequantized(weight).contiguous()
            return quantizers.weight.quantize_heads(values, *order, self.weight_cached)
        by_kind = quantizers.weight.sort_heads(cached, *order)
        return (cached, False) if by_kind is None else (by_kind, True)

    def recasts_weight(self, weight: torch.Tensor) -> bool:
        """Returns True if backward casts the weight again, with the amax that forward found."""
        quantizers = self.quantizers
        if not (self.need_input and quantizers.weight_recast.measures) or self.weight_cached:
            return False
        return quantizers.backward is None and type(weight) is not FP8Parameter

    def fprop(
        self,
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
        quantizers, parallel, features = self.quantizers, self.options.parallel, weight.shape[0]
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

    def saved(
        self,
        x: torch.Tensor | None,
        part: QuantizedTensor | None,
        weight: torch.Tensor,
        cached: QuantizedTensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Returns ``(input, input_scale, weight, weight_scale)`` for backward; None if not needed.

        ``input`` is the columnwise FP8 data ``[in, rows]``; or this rank's rowwise data
        ``[rows, in]`` if rows are gathered or decoded; or ``x``, with the scale of backward's cast,
        if any.
        ``weight`` is the columnwise data ``[in, out]``, or the weight itself, with its amax instead
        of a scale or None, for backward to cast again.
        """
        saved_x = saved_w = x_scale = w_scale = None
        if self.need_weight:
            if self.remakes_input:
                if not self.quantizers.high_precision_wgrad:
                    x_scale = self.quantizers.input.snapshot(part)
            elif self.saves_values:
                saved_x = x
                if not self.quantizers.high_precision_wgrad:
                    x_scale = self.quantizers.input.snapshot()
            elif self.gathers_input or self.quantizers.backward == "dequantized":
                assert part is not None
                saved_x, x_scale = part.rowwise, part.rowwise_scale_inv
            else:
                assert part is not None
                saved_x, x_scale = part.columnwise, part.columnwise_scale_inv
        if self.need_input:
            if self.weight_cached:
                assert cached is not None
                saved_w, w_scale = cached.columnwise, cached.columnwise_scale_inv
            else:
                saved_w = weight
                if cached is not None and self.recasts_weight(weight):
                    w_scale = cached.amax
        return saved_x, x_scale, saved_w, w_scale

    def remade(self, saved: tuple, source: FusedCast, is_gathered: bool) -> tuple:
        """Returns ``saved`` with the input, made by ``source``, if forward has not saved it.

        It is made before ``start_gather`` if its rows are gathered, else before ``wgrad``:
        ``is_gathered`` says at which of the two this is called.
        """
        if not self.remakes_input or self.gathers_input is not is_gathered:
            return saved
        if self.saves_values:
            return source.plain(), *saved[1:]
        made = self.quantizers.input.requantize(source, saved[1])
        return made.columnwise, made.columnwise_scale_inv, *saved[2:]

    def start_gather(self, saved: tuple) -> Pending | None:
        """Begins to gather the saved input's rows for wgrad; None if there is nothing to gather."""
        if not self.need_weight or not self.gathers_input:
            return None
        assert self.options.parallel is not None
        # A gather that is read much later would keep others from the peers' memory.
        gather = self.options.parallel.gathered_rows
        return gather(saved[0], late=self.options.wgrad_store is not None)

    @property
    def transposes_gradient(self) -> bool:
        """True if the gradient's columnwise copy can be made of the rowwise one, after dgrad."""
        quantizers = self.quantizers
        return (
            self.need_input
            and self.need_weight
            and self.options.parallel is None
            and quantizers.backward is None
            and not quantizers.high_precision_wgrad
            and quantizers.grad_output.transposes
        )

    def cast_gradient(
        self,
        dy: torch.Tensor | FusedCast,
        bias_dtype: torch.dtype | None,
        columns_later: bool = False,
    ) -> tuple[Any, torch.Tensor | None, Any]:
        """Quantizes the gradient ``[rows, out]`` of the output, and sums its columns for the bias.

        With ``columns_later``, which requires ``transposes_gradient``, ``dgrad`` makes the
        columnwise copy.

        Returns ``(quantized, grad_bias, dy)``, each None if not needed; ``dy`` is also None if the
        op wrote only FP8. ``dy`` has all ranks' rows if rows are split and wgrad runs in bf16 or
        fp32. With another ``backward`` ``quantized`` is ``dy``.
        """
        quantizers, parallel = self.quantizers, self.options.parallel
        if quantizers.backward is not None:
            plain = dy if isinstance(dy, torch.Tensor) else dy.plain()
            sums = None if bias_dtype is None else plain.sum(0).to(bias_dtype)
            is_read = self.need_input or self.need_weight
            if is_read and parallel is not None and parallel.gathers_gradient:
                plain = parallel.gathered_rows(plain).wait()
            return plain, sums, plain
        fp8_wgrad = self.need_weight and not quantizers.high_precision_wgrad
        need_bias = bias_dtype is not None
        quantized: Any = None
        grad_bias: torch.Tensor | None = None
        gathers = parallel is not None and parallel.gathers_gradient
        if not isinstance(dy, torch.Tensor):
            if not gathers and (fp8_wgrad or (self.need_input and not self.need_weight)):
                dy.with_dbias = need_bias
                columnwise = fp8_wgrad and not columns_later
                quantized = quantizers.grad_output.produce(dy, self.need_input, columnwise)
                return quantized, cast_to(dy.dbias, bias_dtype), None
            dy = dy.plain()
        if parallel is not None and parallel.gathers_gradient:
            if self.need_weight and not fp8_wgrad:
                grad_bias = dy.sum(0) if need_bias else None
                dy = parallel.gathered_rows(dy).wait()
                if self.need_input:
                    quantized = quantizers.grad_output.quantize(dy, True, False)[0]
            elif self.need_input or fp8_wgrad:
                quantized, grad_bias = parallel.quantized_gradient(
                    quantizers, dy, self.need_input, fp8_wgrad, need_bias
                )
            elif need_bias:
                grad_bias = dy.sum(0)
        elif self.need_input or fp8_wgrad:
            quantized, grad_bias = quantizers.grad_output.quantize(
                dy, self.need_input, fp8_wgrad and not columns_later, need_bias
            )
        elif need_bias:
            grad_bias = dy.sum(0)
        return quantized, cast_to(grad_bias, bias_dtype), dy

    def dgrad(
        self,
        saved: tuple,
        dy: Gradient,
        out_dtype: torch.dtype,
        out: torch.Tensor | None = None,
        c: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes ``dy @ weight + c`` [rows, in] of this rank, without a reduction over ranks.

        Frees the rowwise copy of ``dy`` as ``drop_rows`` does; wgrad may then reuse its memory.
        ``c`` has ``out_dtype``, and requires that the backend ``adds`` and that rows are not
        gathered.
        """
        if isinstance(dy, torch.Tensor):
            values = weight_values(self.quantizers, saved[2], dy.dtype)
            return plain_product(dy, values, out_dtype, out, c)
        weight, backend = self.recast_weight(saved), self.quantizers.backend
        if isinstance(dy, QuantizedTensor):
            grad = backend.dgrad(dy, weight, out_dtype, out, c)
            del weight
            self.drop_rows(dy)
            return grad
        assert weight.columnwise is not None
        if out is None:
            cols, device = weight.columnwise.shape[0], weight.columnwise.device
            out = torch.empty(dy.rows, cols, dtype=out_dtype, device=device)
        return dy.multiplied(backend.bound(DGRAD, weight, out_dtype), out)

    def drop_rows(self, dy: QuantizedTensor) -> None:
        """Frees the rowwise copy of a gradient; makes the columnwise one of it if need be."""
        if dy.columnwise is None and self.transposes_gradient:
            assert dy.rowwise is not None
            pad = self.quantizers.grad_output.pad_columnwise
            dy.columnwise = byte_transpose(dy.rowwise, pad_columnwise=pad)
        dy.rowwise = None

    def reduced_dgrad(
        self, saved: tuple, dy: Gradient, out_dtype: torch.dtype
    ) -> tuple[torch.Tensor | None, Pending | None]:
        """Computes the input's gradient ``[rows, in]``, and begins to sum it over ranks if needed.

        Returns ``(gradient, None)`` if no sum is needed, else ``(None, pending)``.
        """
        parallel = self.options.parallel
        if parallel is None or not parallel.column:
            return self.dgrad(saved, dy, out_dtype), None
        if isinstance(dy, torch.Tensor):
            values, rows = dy, dy.shape[0]
            w = weight_values(self.quantizers, saved[2], dy.dtype)

            def plain(part: slice, into: torch.Tensor | None) -> torch.Tensor:
                return plain_product(values[part], w, out_dtype, into)

            like = torch.empty(0, w.shape[1], dtype=out_dtype, device=dy.device)
            return None, parallel.start_input_gradient(plain, rows, like, True)
        assert isinstance(dy, QuantizedTensor)
        assert dy.rowwise is not None
        weight, backend = self.recast_weight(saved), self.quantizers.backend
        assert weight.columnwise is not None

        product = _product_of_rows(backend, DGRAD, dy, weight, out_dtype)
        rows, cols = dy.rowwise.shape[0], weight.columnwise.shape[0]
        like = torch.empty(0, cols, dtype=out_dtype, device=dy.rowwise.device)
        pending = parallel.start_input_gradient(product, rows, like, has_one_scale(dy))
        dy.rowwise = None
        return None, pending

    def recast_weight(self, saved: tuple) -> QuantizedTensor:
        """Returns the weight's columnwise copy: the saved copy, or a cast of the saved weight."""
        _, _, w, w_scale = saved
        quantizers = self.quantizers
        if self.weight_cached:
            return QuantizedTensor(None, None, w, w_scale, quantizers.weight.dtype)
        if w_scale is not None:
            return quantizers.weight_recast.recast(dequantized(w).contiguous(), w_scale)
        return quantized_weight(quantizers, quantizers.weight_recast, w, True)

    def wgrad(
        self,
        saved: tuple,
        dy: torch.Tensor | None,
        quantized: Gradient | None,
        gathered: Pending | None = None,
    ) -> torch.Tensor | None:
        """Computes ``dy.T @ x`` [out, in] now, or passes the computation to ``wgrad_store``.

        Reads ``dy`` if wgrad runs in bf16 or fp32, else ``quantized``. Returns None or
        ``dummy_gradient`` if the gradient went into ``main_grad`` or is delayed.
        """
        operand = quantized.arrived(False) if isinstance(quantized, GatheredRows) else quantized
        operand = None if isinstance(operand, torch.Tensor) else operand
        if self.parameter is not None and not is_wanted(self.parameter):
            if gathered is not None:
                gathered.borrow()
                gathered.release()
            return None

        def compute() -> torch.Tensor | None:
            if gathered is None:
                return self._wgrad_of_rows(saved[0], saved[1], dy, operand, False)
            grad = self._wgrad_of_rows(gathered.borrow(), saved[1], dy, operand, True)
            gathered.release()
            return grad

        return now_or_later(self.parameter, self.options, compute)

    def _wgrad_of_rows(
        self,
        x: torch.Tensor,
        x_scale: torch.Tensor | None,
        dy: torch.Tensor | None,
        quantized: QuantizedTensor | None,
        rowwise: bool,
    ) -> torch.Tensor | None:
        """Computes the weight gradient from the saved input, with the rows of all ranks."""
        quantizers, options = self.quantizers, self.options
        if quantizers.high_precision_wgrad:
            assert dy is not None
            x = input_values(quantizers, x, x_scale, dy.dtype, not self.saves_values)
            return _plain_wgrad(dy, x, self.parameter, self.weight_dtype, options)
        assert quantized is not None
        if self.saves_values:
            inp = quantizers.input.requantize(x, x_scale)
        else:
            columnwise = x
            if rowwise:
                columnwise = byte_transpose(x, pad_columnwise=quantizers.input.pad_columnwise)
            inp = QuantizedTensor(None, None, columnwise, x_scale, quantizers.input.dtype)
        if options.accumulate is None:
            return quantizers.backend.wgrad(quantized, inp, self.weight_dtype)
        main_grad, accumulate = main_grad_of(self.parameter, options)
        quantizers.backend.wgrad(quantized, inp, main_grad.dtype, main_grad, accumulate)
        return dummy_gradient(self.parameter)


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """Returns ``x`` [..., n] as a contiguous matrix [rows, n]; 0 rows are allowed."""
    if x.dim() != 2:
        x = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return x.contiguous()


def with_independent_rows(owner: str, recipe: Any, quantizers: GemmQuantizers) -> GemmQuantizers:
    """Returns quantizers whose fprop gives a row equal bits whatever the other rows are."""
    backend = quantizers.backend.with_independent_rows()
    if backend is None:
        raise NotImplementedError(
            f"{owner}: fp8_recipe must be BlockScaling or RowwiseScaling under batch_invariant, "
            "because other scales depend on other rows or on earlier batches, "
            f"got {type(recipe).__name__}"
        )
    return quantizers._replace(backend=backend)


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


def cast_to(x: Any, dtype: torch.dtype | None) -> Any:
    """Returns ``x`` in ``dtype``, or ``x`` itself if it has this dtype; None for None."""
    return x if x is None or x.dtype is dtype else x.to(dtype)


_dummies: dict[tuple, torch.Tensor] = {}


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
    return now_or_later(parameter, options, lambda: _plain_wgrad(dy, x, parameter, dtype, options))


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


def now_or_later(
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
