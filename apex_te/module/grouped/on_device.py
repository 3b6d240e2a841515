"""GroupedLinear for ``m_splits`` on the device, for which the host never waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...fp8.autocast import get_fp8_recipe
from ...fp8.parameter.operands import is_gathered_in_fp8
from ...fp8.parameter.parameter import FP8Parameter
from ...fp8.scheme.base import GroupMatrices, GroupQuantizers
from ...fp8.scheme.gemm_backend import DGRAD, FPROP
from ...ops import grouped_quantize as op
from ...ops.binding import OpFunction, once_differentiable
from ...ops.grouped_gemm import contract_groups, multiply_groups
from ...ops.grouped_quantize import GroupedOutput, Groups
from ...runtime.tracing import is_traced
from .._core.arguments import checked_splits
from .._core.fp8_module import FP8Module
from .._core.gemm import (
    FP8Call,
    GemmOptions,
    dummy_gradient,
    is_wanted,
    main_grad_of,
    now_or_later,
)
from .._core.programs import apply_function, take_saved, without_autocast
from .parts import SharedCasts
from .weights import Tensors, held_copies, matrices_of, stack_of

MULTIPLE = 16  # of extents, as GEMMs of FP8 codes need them
LARGEST = 1023  # groups of one GEMM


def run(
    call: FP8Call,
    quantizers: GroupQuantizers | None,
    cached: GroupedOutput | None,
    x: torch.Tensor,
    splits: torch.Tensor,
    weights: Tensors,
    biases: Tensors,
    shared: SharedCasts | None = None,
) -> torch.Tensor:
    """Computes the output ``[rows, out]`` of all groups; rows after the last one are zeros.

    ``weights`` and ``biases`` have one tensor for each group, or one of all groups.
    """
    groups = op.groups_of(splits, x.shape[0])
    options = call.options[0]
    if call.is_fp8:
        assert quantizers is not None
        function: Any = GroupsFunction
        kept = call.keep_columnwise
        rest: tuple = (GroupsCall(quantizers, cached, options, call.dtype, shared, kept),)
    else:
        function, rest = HighPrecisionGroupsFunction, (call.dtype, options)
        if quantizers is not None:
            with torch.no_grad():
                quantizers.input.record(x.contiguous(), groups)
                quantizers.weight.record_matrices(matrices_of(weights), groups)
    arguments = (x, groups.table, *rest, len(weights), *weights, *biases)
    out = apply_function(function, arguments)
    if not call.is_fp8 and quantizers is not None and out.requires_grad:
        record = quantizers.grad_output.record
        out.register_hook(lambda grad: record(grad.detach().contiguous(), groups))
    return out


def shared_casts(module: FP8Module) -> SharedCasts | None:
    """Returns what casts the weights for all parts of the call that the module computes."""
    if torch.compiler.is_compiling() or module._modes.part is None:
        return None
    casts: SharedCasts | None = module._modes.part.casts
    return casts


def stays_on_device(device: torch.device) -> bool:
    """Returns True if the host would have to wait to read a tensor on ``device``."""
    return device.type == "cuda"


def check_splits(owner: str, splits: torch.Tensor, groups: int, device: torch.device) -> None:
    """Checks the dtype, shape and device of ``m_splits``, which must be the input's device."""
    if splits.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{owner}: m_splits must be int32 or int64, got {splits.dtype}")
    if splits.shape != (groups,):
        raise ValueError(f"{owner}: m_splits must have shape [{groups}], got {list(splits.shape)}")
    if splits.device != device:
        raise ValueError(
            f"{owner}: m_splits must be a list of ints or a tensor on {device} like inp, "
            f"got {splits.device}"
        )


def read_splits(owner: str, splits: torch.Tensor, rows: int) -> tuple[int, ...]:
    """Returns the rows of each group as ints, from a tensor that the host can read.

    On the meta device, without values, all rows count as the first group's.
    """
    if not rows:
        return (0,) * splits.numel()
    if splits.is_meta:
        return (rows,) + (0,) * (splits.numel() - 1)
    counts = tuple(splits.tolist())
    if min(counts) < 0 or sum(counts) > rows:
        raise ValueError(
            f"{owner}: m_splits must be counts of at most the {rows} rows of inp, "
            f"got {list(counts)}"
        )
    return counts


def table_splits(module: Any, m_splits: Any, rows: int, device: torch.device) -> torch.Tensor:
    """Returns checked splits as a tensor on ``device``, for a stack of weights."""
    owner, count = type(module).__name__, module.num_gemms
    if count > LARGEST:
        raise NotImplementedError(
            f"{owner}: num_gemms must be at most {LARGEST} with single_parameter=True, got {count}"
        )
    if isinstance(m_splits, torch.Tensor):
        check_splits(owner, m_splits, count, device)
        if device.type == "cpu" and not is_traced():
            read_splits(owner, m_splits, rows)
        return m_splits
    splits = checked_splits(owner, count, m_splits, rows)
    known = module._modes.splits
    if known is None or known[0] != splits or known[1].device != device:
        # Kept, since the capture of a CUDA graph can copy nothing from the host.
        with torch.inference_mode(False):
            known = splits, torch.tensor(splits, dtype=torch.int32, device=device)
        if not is_traced():
            module._modes.splits = known
    return known[1]


def serves(module: Any, call: FP8Call) -> bool:
    """Returns True if a stack of weights is multiplied as one with the call's recipe."""
    if not call.is_fp8:
        return True
    if module.in_features % MULTIPLE or module.out_features % MULTIPLE:
        return False
    # Slots of a state, which are views of one tensor, can not be joined in a graph.
    if torch.compiler.is_compiling() and get_fp8_recipe().keeps_state:
        return False
    return module._quantizers_of_groups(call) is not None


def check_supported(module: FP8Module, weights: Tensors) -> None:
    """Checks that the module supports ``m_splits`` on a GPU, before anything runs."""
    what = None
    if torch.compiler.is_compiling():
        what = "torch.compile"
    elif module.delay_wgrad_compute:
        what = "delay_wgrad_compute=True"
    elif module.save_original_input:
        what = "save_original_input=True"
    elif any(type(weight) is FP8Parameter and is_gathered_in_fp8(weight) for weight in weights):
        what = "enable_fp8_all_gather"
    elif len(weights) > LARGEST:
        what = f"more than {LARGEST} groups"
    if what is not None:
        raise NotImplementedError(
            f"{type(module).__name__}: m_splits must be a list of ints with {what}, got a tensor "
            "on the GPU"
        )


def checked_quantizers(
    owner: str, quantizers: GroupQuantizers | None, in_features: int, out_features: int
) -> GroupQuantizers:
    """Returns ``quantizers`` after a check that scheme and sizes allow ``m_splits`` on a GPU."""
    if quantizers is None:
        recipe = get_fp8_recipe()
        backward, what = getattr(recipe, "backward", None), "in this format"
        if backward is not None:
            what = f"with backward={backward!r}"
        raise NotImplementedError(
            f"{owner}: m_splits must be a list of ints with {type(recipe).__name__} {what}, which "
            "has no grouped GEMMs with sizes on the device, got a tensor on the GPU"
        )
    if in_features % MULTIPLE or out_features % MULTIPLE:
        raise NotImplementedError(
            f"{owner}: in_features and out_features must be multiples of {MULTIPLE} for FP8 with "
            f"m_splits on the GPU, got {in_features} and {out_features}; "
            "give m_splits as a list of ints"
        )
    return quantizers


class GroupsCall(NamedTuple):
    """Named tuple of what a call of the GEMMs of all groups in FP8 needs besides its tensors.

    Attributes:
        cached: both FP8 copies of all weights, or None to cast them.
        dtype: the dtype of the results.
        shared: what casts the weights for all parts of a call, None for a call of its own.
        keep_columnwise: forward makes both copies of the weights, and backward casts none.
    """

    quantizers: GroupQuantizers
    cached: GroupedOutput | None
    options: GemmOptions
    dtype: torch.dtype
    shared: SharedCasts | None = None
    keep_columnwise: bool = False

    def cast_weights(
        self, weights: Tensors, groups: Groups, need_input: bool
    ) -> tuple[GroupedOutput, tuple[torch.Tensor | None, ...]]:
        """Returns the rowwise copies, and the tensors that ``recast_weights`` needs in backward."""
        if self.cached is not None:
            saved = (self.cached.columnwise, self.cached.scale_inv) if need_input else ()
            return self.cached, saved
        if self.shared is None:
            return self._cast(weights, groups, need_input)
        # Another part may have rows of other groups.
        return self.shared.forward(lambda: self._cast(weights, None, need_input), need_input)

    def _cast(
        self, weights: Tensors, groups: Groups | None, need_input: bool
    ) -> tuple[GroupedOutput, tuple[torch.Tensor | None, ...]]:
        held = held_copies(weights, self.quantizers, False)
        if held is not None:
            return held, (None, None, *weights) if need_input else ()
        quantizer, matrices, scales = self.quantizers.weight, matrices_of(weights), None
        if need_input:
            scales = quantizer.kept_scales(GroupMatrices(matrices, groups))
        keep = need_input and self.keep_columnwise
        out = quantizer.quantize_matrices(matrices, groups, True, keep, scales)
        if keep:
            return out, (out.columnwise, out.scale_inv)
        return out, (*(scales or (None, None)), *weights) if need_input else ()

    def recast_weights(self, saved: Any, groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the columnwise copies and their ``scale_inv``."""
        if self.cached is not None:
            return saved[0], saved[1]
        if self.shared is None:
            return self._recast(saved, groups)
        return self.shared.backward(lambda: self._recast(saved, None))

    def _recast(self, saved: Any, groups: Groups | None) -> tuple[torch.Tensor, torch.Tensor]:
        if len(saved) == 2:  # kept by forward
            return tuple(saved)
        scale, scale_inv, *weights = saved
        out = held_copies(weights, self.quantizers, True)
        if out is None:
            scales = None if scale is None else (scale, scale_inv)
            recast = self.quantizers.weight_recast.quantize_matrices
            out = recast(matrices_of(weights), groups, False, True, scales)
        assert out.columnwise is not None
        return out.columnwise, out.scale_inv

    def multiply(
        self, product: int, q: GroupedOutput, b: Any, b_scale_inv: Any, groups: Groups
    ) -> torch.Tensor:
        """Returns the product of rows; those after the last group have undefined values."""
        out = self.quantizers.backend.multiply_groups(
            product, q.rowwise, b, q.row_scale_inv, b_scale_inv, groups
        )
        return out.to(self.dtype)


class GroupsFunction(OpFunction):
    """Autograd function of the linear layers of all groups at once in FP8."""

    LABEL = "GroupedLinear"

    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        table: torch.Tensor,
        call: GroupsCall,
        held: int,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        quantizers, options = call.quantizers, call.options
        weights, biases = parameters[:held], parameters[held:]
        x = inp.contiguous()
        groups = Groups(table, x.shape[0], (table.numel() - 1) // 3)
        needs = ctx.needs_input_grad
        need_input, need_weight = needs[0], any(needs[4 : 4 + held])
        fp8_wgrad = need_weight and not quantizers.high_precision_wgrad
        saves_codes = fp8_wgrad and not options.save_original
        q = quantizers.input.quantize(x, groups, True, saves_codes)
        w, saved_w = call.cast_weights(weights, groups, need_input)
        out = call.multiply(FPROP, q, w.rowwise, w.rowwise_scale_inv, groups)
        out = _finished(out, groups, call.dtype, biases)
        saved_x = q.columnwise if saves_codes else x if need_weight else None
        ctx.save_for_backward(table, saved_x, q.scale_inv, *saved_w)
        ctx.call = call
        _remember(ctx, inp, options, weights, biases, needs[0], needs[4:])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple:
        return without_autocast(_backward, ctx, grad_output)


def _backward(ctx: Any, grad_output: torch.Tensor) -> tuple:
    table, x, x_scale_inv, *saved_w = take_saved(ctx)
    quantizers = ctx.call.quantizers
    dy = grad_output.contiguous()
    groups = Groups(table, dy.shape[0], (table.numel() - 1) // 3)
    fp8_wgrad = ctx.need_weight and not quantizers.high_precision_wgrad
    grad_input = None
    q: Any = None
    if ctx.need_input or fp8_wgrad:
        q = quantizers.grad_output.quantize(dy, groups, ctx.need_input, fp8_wgrad)
    if ctx.need_input:
        call = ctx.call._replace(dtype=ctx.input_dtype)
        grad_input = call.multiply(DGRAD, q, *call.recast_weights(saved_w, groups), groups)
        grad_input = _finished(grad_input, groups, ctx.input_dtype)

    # Without the rowwise copy, which a delayed product would keep.
    dy_codes, dy_scale_inv = (q.columnwise, q.scale_inv) if fp8_wgrad else (None, None)

    def product(*out: Any) -> torch.Tensor:
        codes, scale_inv = x, x_scale_inv
        if ctx.options.save_original:
            made = quantizers.input.quantize(x, groups, False, True)
            codes, scale_inv = made.columnwise, made.scale_inv
        contract = quantizers.backend.contract_groups
        return contract(dy_codes, codes, dy_scale_inv, scale_inv, groups, *out)

    if not fp8_wgrad:
        product = _high_precision_wgrad(dy, x, groups)
    return (
        grad_input, None, None, None,
        *_weight_gradients(ctx, product), *_bias_gradients(ctx, dy, groups),
    )  # fmt: skip


class HighPrecisionGroupsFunction(OpFunction):
    """Autograd function of the linear layers of all groups at once in bf16 or fp32."""

    LABEL = "GroupedLinear"

    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        table: torch.Tensor,
        out_dtype: torch.dtype,
        options: GemmOptions,
        held: int,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        weights, biases = parameters[:held], parameters[held:]
        x = inp.to(out_dtype).contiguous()
        groups = Groups(table, x.shape[0], (table.numel() - 1) // 3)
        out = multiply_groups(x, stack_of(weights, out_dtype, 2), groups)
        out = _finished(out, groups, out_dtype, biases)
        needs = ctx.needs_input_grad
        _remember(ctx, inp, options, weights, biases, needs[0], needs[5:])
        saved_w = weights if ctx.need_input else ()
        ctx.save_for_backward(table, x if ctx.need_weight else None, *saved_w)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple:
        return without_autocast(_high_precision_backward, ctx, grad_output)


def _high_precision_backward(ctx: Any, grad_output: torch.Tensor) -> tuple:
    table, x, *weights = take_saved(ctx)
    dy = grad_output.contiguous()
    groups = Groups(table, dy.shape[0], (table.numel() - 1) // 3)
    grad_input = None
    if ctx.need_input:
        columnwise = stack_of(weights, dy.dtype, 2).transpose(-2, -1)
        grad_input = _finished(multiply_groups(dy, columnwise, groups), groups, ctx.input_dtype)
    return (
        grad_input, None, None, None, None,
        *_weight_gradients(ctx, _high_precision_wgrad(dy, x, groups)),
        *_bias_gradients(ctx, dy, groups),
    )  # fmt: skip


def _remember(
    ctx: Any,
    inp: torch.Tensor,
    options: GemmOptions,
    weights: Tensors,
    biases: Tensors,
    need_input: bool,
    needs: tuple[bool, ...],
) -> None:
    """Sets the attributes of ``ctx`` that both backwards read, besides saved tensors."""
    ctx.is_stack = weights[0].dim() == 3
    ctx.need_input = need_input
    ctx.needs = needs[: len(weights)]
    ctx.need_weight = any(ctx.needs)
    ctx.need_bias = needs[len(weights) :]
    ctx.weight_dtype = weights[0].dtype
    ctx.bias_dtype = biases[0].dtype if biases else None
    ctx.input_dtype = inp.dtype
    ctx.device_type = inp.device.type
    ctx.options = options
    # main_grad is an attribute of these very parameters, which saved copies could lose.
    in_place = options.accumulate is not None or options.wgrad_store is not None
    ctx.parameters = weights if in_place and ctx.need_weight else None


def _finished(
    out: torch.Tensor, groups: Groups, dtype: torch.dtype, biases: Tensors = ()
) -> torch.Tensor:
    """Returns a GEMM [rows, out] in ``dtype``, with biases, and zeros in rows of no group."""
    out = out.to(dtype)
    op.finish_rows(out, groups, stack_of(biases, dtype, 1) if biases else None)
    # Graphs of torch 2.11 lose the gradient of a function's output that was written to.
    return out.clone() if torch.compiler.is_compiling() else out


def _high_precision_wgrad(dy: torch.Tensor, x: Any, groups: Groups) -> Callable[..., torch.Tensor]:
    """Returns a product like ``GemmBackend.contract_groups`` of given operands in bf16 or fp32."""

    def product(
        wide: bool, out: torch.Tensor | None = None, accumulate: bool = False
    ) -> torch.Tensor:
        # What is added to main_grad is not rounded before.
        grads = contract_groups(dy.t(), x.to(dy.dtype), groups, wide)
        op.zero_unused(grads, groups)
        if out is None:
            return grads
        return out.add_(grads) if accumulate else out.copy_(grads)

    return product


def _weight_gradients(ctx: Any, product: Callable[..., torch.Tensor]) -> list[torch.Tensor | None]:
    """Returns what autograd gets for each weight, and writes ``main_grad`` if asked to.

    ``product(wide, out, accumulate)`` computes the weight gradients ``[groups, out, in]``, zeros
    for a group without rows.
    """
    if not ctx.need_weight:
        return [None] * len(ctx.needs)
    if ctx.is_stack:
        (parameter,) = ctx.parameters or (None,)
        return [stack_gradient(parameter, ctx.options, ctx.weight_dtype, product)]
    grads = product(ctx.parameters is not None)
    if ctx.parameters is None:
        parts = grads.to(ctx.weight_dtype).unbind(0)
        return [part if need else None for part, need in zip(parts, ctx.needs, strict=True)]
    results: list[torch.Tensor | None] = []
    lists: dict[bool, tuple[list, list]] = {True: ([], []), False: ([], [])}
    for parameter, grad, need in zip(ctx.parameters, grads.unbind(0), ctx.needs, strict=True):
        if not need or not is_wanted(parameter):
            results.append(None)
            continue
        main_grad, accumulate = main_grad_of(parameter, ctx.options)
        targets, sources = lists[accumulate]
        targets.append(main_grad)
        sources.append(grad)
        results.append(dummy_gradient(parameter))
    if lists[True][0]:
        torch._foreach_add_(*lists[True])
    if lists[False][0]:
        torch._foreach_copy_(*lists[False])
    return results


def stack_gradient(
    parameter: Any, options: GemmOptions, dtype: torch.dtype, product: Callable[..., torch.Tensor]
) -> torch.Tensor | None:
    """Returns what autograd gets for a stack of weights; its product may be delayed.

    ``product`` is as in ``_weight_gradients``; ``parameter`` is read only if it is written to.
    """
    if options.accumulate is None and options.wgrad_store is None:
        return product(False).to(dtype)
    if not is_wanted(parameter):
        return None

    def compute() -> torch.Tensor | None:
        if options.accumulate is None:
            return product(False).to(dtype)
        product(True, *main_grad_of(parameter, options))
        return dummy_gradient(parameter)

    return now_or_later(parameter, options, compute)


def _bias_gradients(ctx: Any, dy: torch.Tensor, groups: Groups) -> list[torch.Tensor | None]:
    """Returns the gradient of each bias, None for one that needs none."""
    if not any(ctx.need_bias):
        return [None] * len(ctx.need_bias)
    sums: Any = op.column_sums(dy, groups).to(ctx.bias_dtype)
    if ctx.is_stack:
        return [sums]
    return [part if need else None for part, need in zip(sums, ctx.need_bias, strict=True)]
