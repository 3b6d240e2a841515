"""Cross entropy of a language model's head, computed in chunks without all logits in memory.

The logits of a few rows at a time are computed, turned into their loss and gradient in place, and
multiplied on into the gradients of hidden states and weight. Where the incoming gradient is one
number this happens in forward, and backward only multiplies by that number. Single losses, and
float16, whose gradients would vanish before a loss scale multiplies them, keep two numbers for each
row instead, and backward computes the logits again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import distributed

from ..comm.collectives import world_size
from ..comm.groups import check_process_group
from ..comm.split_cross_entropy import (
    Columns,
    own_columns,
    split_gradient,
    split_losses,
    split_targets,
)
from ..fp8.parameter.operands import dequantized
from ..fp8.scheme import GemmQuantizers
from ..fp8.scheme.base import build_quantizers
from ..fp8.tensor import QuantizedTensor
from ..ops.binding import (
    OpFunction,
    needs_autograd,
    once_differentiable,
    second_backward_is_refused,
)
from ..ops.cross_entropy import (
    REDUCTIONS,
    count_valid,
    cross_entropy_bwd,
    cross_entropy_fwd,
    scale_gradient,
    sum_losses,
)
from ..ops.wgrad_gemm import wgrad_gemm
from ..recipe import Recipe, stateless_recipe
from ..runtime.named_arguments import named_arguments
from ._core.programs import is_autocast, without_autocast

__all__ = ["linear_cross_entropy"]

_NAME = "linear_cross_entropy"
# Fewer rows make the GEMMs slow: the weight's gradient is read and written for each chunk.
_CHUNK_BYTES = 320 << 20
_LEAST_ROWS, _ROW_MULTIPLE = 256, 128
# Logits of a split vocabulary that have a float32 copy at a time.
_WIDE_ELEMENTS = 1 << 24


@named_arguments()
def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    fp8_recipe: Recipe | str | None = None,
    chunk_rows: int | None = None,
    weight_grad_dtype: torch.dtype | None = None,
    tp_group: Any = None,
    first_index: int | None = None,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """Computes ``cross_entropy(hidden @ weight.T + bias, target)`` a chunk of rows at a time.

    Loss and gradients are those of the GEMM followed by ``apex_te.ops.cross_entropy``, except that
    the weight's gradient, a sum over chunks, is rounded after each chunk. In float32 and bfloat16
    with reduction "mean" or "sum", forward computes the gradients, and backward may run only once.
    Otherwise backward computes the logits again. Under ``torch.autocast`` hidden states, weight and
    bias are cast to its dtype.

    With ``tp_group`` each rank has the weight's rows for a part of the vocabulary; hidden states
    and targets are equal on all ranks. For each chunk the ranks exchange three float32 numbers per
    row in two all-reduces, and sum the gradient of the hidden states in one more.

    Args:
        hidden: hidden states ``[..., in]`` in float32, float16 or bfloat16.
        weight: the head's weight ``[vocabulary, in]`` in the dtype of ``hidden``, plain or held in
            FP8.
        target: class indices ``[...]``, int64 or int32. An index outside the vocabulary, other than
            ``ignore_index``, raises ValueError on the CPU and gives NaN on the GPU.
        bias: ``[vocabulary]`` in the dtype of ``hidden``, or None.
        ignore_index: rows with this target have loss 0 and gradient 0 and do not count.
        label_smoothing: in [0, 1], share of the target's probability spread over the vocabulary.
        reduction: "mean" over rows that are not ignored, "sum" or "none".
        fp8_recipe: recipe without state, or its name, such as ``"tensorwise"`` or ``"blockwise"``,
            with which the three GEMMs run in FP8. None computes them in the dtype of ``hidden``,
            even inside ``fp8_autocast``.
        chunk_rows: rows of a chunk; None takes as many as have 320 MiB of logits.
        weight_grad_dtype: dtype in which the weight gradients of the chunks are summed: that of
            ``hidden`` (the default) or float32.
        tp_group: process group over which the vocabulary is split; None means that this rank has
            all of it.
        first_index: index in the vocabulary of this rank's first row of ``weight``. None means that
            all ranks have equally many rows, in the order of ranks.
        vocab_size: number of rows of all ranks together; required with ``first_index``.

    Returns:
        The loss in float32: a scalar, or with "none" the losses in the shape of ``target``.

    Raises:
        TypeError: dtypes do not match, or ``tp_group`` is not a process group.
        ValueError: a shape or option does not match, tensors are on different devices, or the
            recipe keeps state.
    """
    given = {"hidden": hidden, "weight": weight, "target": target, "bias": bias}
    for name, value in given.items():
        if not isinstance(value, torch.Tensor) and not (name == "bias" and value is None):
            raise TypeError(f"{_NAME}: {name} must be a torch.Tensor, got {type(value).__name__}")
    device_type = hidden.device.type
    if is_autocast(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        with torch.autocast(device_type, enabled=False):  # the GEMMs choose their own dtypes
            return linear_cross_entropy(
                hidden, weight, target, bias,
                ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction,
                fp8_recipe=fp8_recipe, chunk_rows=chunk_rows, weight_grad_dtype=weight_grad_dtype,
                tp_group=tp_group, first_index=first_index, vocab_size=vocab_size,
            )  # fmt: skip
    _check(hidden, weight, target, bias, reduction, label_smoothing, chunk_rows)
    sums = hidden.dtype if weight_grad_dtype is None else weight_grad_dtype
    if sums not in (hidden.dtype, torch.float32):
        raise TypeError(
            f"{_NAME}: weight_grad_dtype must be {hidden.dtype} or torch.float32, got {sums}"
        )
    recipe = stateless_recipe(_NAME, "fp8_recipe", fp8_recipe)
    check_process_group(_NAME, "tp_group", tp_group)
    columns = own_columns(_NAME, weight.shape[0], tp_group, first_index, vocab_size)
    ranks = 1 if tp_group is None else world_size(tp_group)
    if chunk_rows is None:  # equal on all ranks, whatever part each has
        words = max(1, -(-columns.vocabulary // ranks))
        fitting = _CHUNK_BYTES // (words * hidden.element_size())
        chunk_rows = max(_LEAST_ROWS, fitting // _ROW_MULTIPLE * _ROW_MULTIPLE)
    options = _Options(
        ignore_index, label_smoothing, reduction, recipe, chunk_rows, sums,
        needs_autograd(hidden, weight, bias), columns if ranks > 1 else None,
    )  # fmt: skip
    rows = hidden.reshape(target.numel(), hidden.shape[-1]).contiguous()
    loss = _LinearCrossEntropy.apply(
        rows, weight.contiguous(), bias, target.reshape(-1).contiguous(), options
    )
    return loss.view(target.shape) if reduction == "none" else loss


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    reduction: str,
    label_smoothing: float,
    chunk_rows: int | None,
) -> None:
    """Raises the error of the first argument of ``linear_cross_entropy`` that does not fit."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"{_NAME}: reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if isinstance(label_smoothing, (bool, str)) or not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{_NAME}: label_smoothing must be in [0, 1], got {label_smoothing}")
    if chunk_rows is not None and (not isinstance(chunk_rows, int) or chunk_rows < 1):
        raise ValueError(f"{_NAME}: chunk_rows must be a positive integer, got {chunk_rows!r}")
    if hidden.dim() < 1 or hidden.shape[:-1] != target.shape:
        raise ValueError(
            f"{_NAME}: target must have the shape of hidden without the last dimension, "
            f"{list(hidden.shape[:-1])}, got {list(target.shape)}"
        )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or weight.shape[0] < 1:
        raise ValueError(
            f"{_NAME}: weight must be [vocabulary, {hidden.shape[-1]}], got {list(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{_NAME}: bias must be [{weight.shape[0]}], got {list(bias.shape)}")
    if hidden.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"{_NAME}: hidden must be float32, float16 or bfloat16, got {hidden.dtype}")
    for key, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype is not hidden.dtype:
            raise TypeError(
                f"{_NAME}: {key} must have dtype {hidden.dtype} like hidden, got {tensor.dtype}"
            )
    for key, tensor in (("weight", weight), ("target", target), ("bias", bias)):
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(
                f"{_NAME}: {key} must be on {hidden.device} like hidden, got {tensor.device}"
            )


class _Options(NamedTuple):
    """Checked options of ``linear_cross_entropy``.

    Attributes:
        weight_grad_dtype: dtype in which the chunks' weight gradients are summed.
        differentiated: autograd may ask for a gradient.
        columns: this rank's part of a vocabulary that is split over ranks; None if it is not.
    """

    ignore_index: int
    label_smoothing: float
    reduction: str
    recipe: Recipe | None
    chunk_rows: int
    weight_grad_dtype: torch.dtype
    differentiated: bool
    columns: Columns | None


class _Head:
    """GEMMs of a head with chunks of rows, and the gradients that they add up to."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        options: _Options,
        wanted: tuple[bool, bool, bool],
    ) -> None:
        weight = dequantized(weight)  # once, and not for each chunk
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.columns = options.columns
        self.wanted = wanted
        self.quantizers: GemmQuantizers | None = None
        if options.recipe is not None:
            sets = build_quantizers(options.recipe, None, 1, hidden.device)
            self.quantizers = quantizers = sets.recording[0]
            self.fp8_weight = quantizers.weight.quantize(weight, True, wanted[0])[0]
        self.x: QuantizedTensor | None = None
        self.dhidden = torch.empty_like(hidden) if wanted[0] else None
        self.dweight = weight.new_empty(weight.shape, dtype=options.weight_grad_dtype)
        if not wanted[1]:
            self.dweight = self.dweight.new_empty(0)
        self.dbias = weight.new_zeros(len(weight), dtype=torch.float32) if wanted[2] else None
        if len(hidden) == 0:
            self.dweight.zero_()

    def logits(self, begin: int, end: int, out: torch.Tensor) -> torch.Tensor:
        """Writes the logits of rows ``begin`` to ``end`` into ``out``, and returns it."""
        x = self.hidden[begin:end]
        if self.quantizers is None:
            if self.bias is None:
                return torch.mm(x, self.weight.t(), out=out)
            return torch.addmm(self.bias, x, self.weight.t(), out=out)
        self.x = self.quantizers.input.quantize(x, True, self.wanted[1])[0]
        return self.quantizers.backend.fprop(
            self.x, self.fp8_weight, out.dtype, bias=self.bias, out=out
        )

    def add_gradients(self, begin: int, end: int, dlogits: torch.Tensor) -> None:
        """Adds what rows ``begin`` to ``end`` give to the gradients."""
        x, first = self.hidden[begin:end], begin == 0
        if self.dbias is not None:
            self.dbias += dlogits.sum(0, dtype=torch.float32)
        quantizers = self.quantizers
        if quantizers is None or quantizers.high_precision_wgrad:
            self._add_wgrad(dlogits, x, first)
        if quantizers is None:
            if self.dhidden is not None:
                torch.mm(dlogits, self.weight, out=self.dhidden[begin:end])
            return
        in_fp8 = self.wanted[1] and not quantizers.high_precision_wgrad
        if not in_fp8 and self.dhidden is None:
            return
        dy = quantizers.grad_output.quantize(dlogits, self.wanted[0], in_fp8)[0]
        if self.dhidden is not None:
            quantizers.backend.dgrad(dy, self.fp8_weight, x.dtype, out=self.dhidden[begin:end])
        if in_fp8:
            assert self.x is not None
            quantizers.backend.wgrad(
                dy, self.x, self.dweight.dtype, out=self.dweight, accumulate=not first
            )

    def _add_wgrad(self, dlogits: torch.Tensor, x: torch.Tensor, first: bool) -> None:
        """Adds the weight gradient of some rows, or writes it if they are the first."""
        if not self.wanted[1]:
            return
        if self.dweight.dtype is not x.dtype:
            wgrad_gemm(dlogits, x, self.dweight, accumulate=not first)
        elif first:
            torch.mm(dlogits.t(), x, out=self.dweight)
        else:
            self.dweight.addmm_(dlogits.t(), x)

    def gradients(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Returns the wanted gradients, else None; that of hidden is summed over the ranks."""
        if self.columns is not None and self.dhidden is not None:
            distributed.all_reduce(self.dhidden, group=self.columns.group)
        return self.dhidden, self.dweight if self.wanted[1] else None, self.dbias


class _LinearCrossEntropy(OpFunction):
    LABEL = _NAME

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        options: _Options,
    ) -> torch.Tensor:
        wanted = (False,) * 3
        if options.differentiated:
            wanted = tuple(ctx.needs_input_grad[:3])
        now = options.reduction != "none" and hidden.dtype is not torch.float16
        head = _Head(hidden, weight, bias, options, wanted if now else (False,) * 3)
        rows = len(hidden)
        later = any(wanted) and not now
        stats = hidden.new_empty(rows, 2, dtype=torch.float32) if later else None
        num_valid = None
        if options.reduction == "mean":
            num_valid = count_valid(target, options.ignore_index)
        buffer = hidden.new_empty(min(options.chunk_rows, rows), len(weight))
        losses = hidden.new_empty(rows, dtype=torch.float32)
        for begin in range(0, rows, options.chunk_rows):
            end = min(begin + options.chunk_rows, rows)
            logits = head.logits(begin, end, buffer[: end - begin])
            losses[begin:end] = _losses(
                logits,
                target[begin:end],
                logits if now and any(wanted) else None,
                None if stats is None else stats[begin:end],
                num_valid,
                options,
            )
            if now and any(wanted):
                head.add_gradients(begin, end, logits)
        ctx.options, ctx.wanted, ctx.now = options, wanted, now
        ctx.device_type = hidden.device.type
        if later:
            ctx.save_for_backward(hidden, weight, bias, target, stats, num_valid)
        elif any(wanted):
            ctx.dtypes = [None if t is None else t.dtype for t in (hidden, weight, bias)]
            if num_valid is None:
                num_valid = count_valid(target, options.ignore_index)
            ctx.save_for_backward(*head.gradients(), target, num_valid)
            ctx.once = second_backward_is_refused(ctx)
        if options.reduction == "none":
            return losses
        return sum_losses(losses, num_valid if options.reduction == "mean" else None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return without_autocast(_backward, ctx, grad_output)


def _backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Does what the ``backward`` of ``_LinearCrossEntropy`` does."""
    factor = grad_output.reshape(-1).contiguous()
    if ctx.now:
        # A second backward would find them multiplied already: autograd sees it and refuses, or
        # else copies are multiplied.
        *made, target, num_valid = ctx.saved_tensors
        ignore_index = ctx.options.ignore_index
        # Only the gradient of the hidden states has a row for each target.
        gradients = tuple(
            None
            if g is None
            else scale_gradient(
                g if ctx.once else g.clone(),
                factor,
                target=rows,
                num_valid=num_valid,
                ignore_index=ignore_index,
            )
            for g, rows in zip(made, (target, None, None), strict=True)
        )
        dtypes = ctx.dtypes
    else:
        hidden, weight, bias, target, stats, num_valid = ctx.saved_tensors
        gradients = _recomputed(
            _Head(hidden, weight, bias, ctx.options, ctx.wanted),
            target, stats, num_valid, factor, ctx.options,
        )  # fmt: skip
        dtypes = [None if t is None else t.dtype for t in (hidden, weight, bias)]
    found = (None if g is None else g.to(dtype) for g, dtype in zip(gradients, dtypes, strict=True))
    return (*found, None, None)


def _losses(
    logits: torch.Tensor,
    target: torch.Tensor,
    grad: torch.Tensor | None,
    stats: torch.Tensor | None,
    num_valid: torch.Tensor | None,
    options: _Options,
) -> torch.Tensor:
    """Returns the losses of a chunk, float32 ``[rows]``, from this rank's columns of the logits.

    ``grad``, which may be the logits, gets their gradient, divided by ``num_valid``, the number of
    rows that count; float32 ``stats`` ``[rows, 2]`` is written for ``_gradient``.
    """
    columns, smoothing = options.columns, options.label_smoothing
    if columns is None:
        return cross_entropy_fwd(
            logits,
            target,
            grad=grad,
            stats=stats,
            num_valid=num_valid,
            ignore_index=options.ignore_index,
            label_smoothing=smoothing,
        )
    targets = split_targets(_NAME, target, columns, options.ignore_index)
    losses, largest, exp_sum = split_losses(logits, targets, smoothing, columns)
    if stats is not None:
        stats[:, 0], stats[:, 1] = largest, exp_sum
    if grad is not None:
        factor = logits.new_ones(1, dtype=torch.float32) if num_valid is None else 1.0 / num_valid
        split_gradient(
            logits, targets, largest, exp_sum, factor, smoothing, columns, grad, _WIDE_ELEMENTS
        )
    return losses


def _gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    stats: torch.Tensor,
    factor: torch.Tensor,
    num_valid: torch.Tensor | None,
    options: _Options,
) -> None:
    """Overwrites a chunk's logits, this rank's columns, with their gradient.

    ``factor`` is the gradient of the losses, float32, one element or ``[rows]``.
    """
    columns, smoothing = options.columns, options.label_smoothing
    if columns is None:
        cross_entropy_bwd(
            logits,
            target,
            stats,
            factor,
            logits,
            num_valid=num_valid,
            ignore_index=options.ignore_index,
            label_smoothing=smoothing,
        )
        return
    targets = split_targets(_NAME, target, columns, options.ignore_index)
    if num_valid is not None:
        factor = factor / num_valid
    split_gradient(
        logits, targets, stats[:, 0], stats[:, 1], factor, smoothing, columns, logits,
        _WIDE_ELEMENTS,
    )  # fmt: skip


def _recomputed(
    head: _Head,
    target: torch.Tensor,
    stats: torch.Tensor,
    num_valid: torch.Tensor | None,
    factor: torch.Tensor,
    options: _Options,
) -> tuple[torch.Tensor | None, ...]:
    """Computes the logits again and returns the gradients of hidden, weight and bias."""
    rows = len(head.hidden)
    buffer = head.hidden.new_empty(min(options.chunk_rows, rows), len(head.weight))
    for begin in range(0, rows, options.chunk_rows):
        end = min(begin + options.chunk_rows, rows)
        logits = head.logits(begin, end, buffer[: end - begin])
        _gradient(
            logits,
            target[begin:end],
            stats[begin:end],
            factor if factor.numel() == 1 else factor[begin:end],
            num_valid,
            options,
        )
        head.add_gradients(begin, end, logits)
    if head.dhidden is not None:
        # Infinite gradients of other rows reach these by a scale that rows share, and by the
        # padding of bfloat16 matmuls on CPUs with matrix units.
        head.dhidden.masked_fill_((target == options.ignore_index).unsqueeze(1), 0.0)
    return head.gradients()
