"""Losses of a language model's head, computed in chunks without all logits in memory.

The logits of a few rows at a time are computed, turned into their loss and gradient in place, and
multiplied on into the gradients of hidden states and weight. Where the incoming gradient is one
number this happens in forward, and backward only multiplies by that number. Single losses, and
float16, whose gradients would vanish before a loss scale multiplies them, keep two numbers for each
row instead, and backward computes the logits again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ...comm.collectives import world_size
from ...comm.groups import check_process_group
from ...comm.split_cross_entropy import (
    Columns,
    own_columns,
    split_entropies,
    split_gradient,
    split_losses,
    split_targets,
)
from ...ops.binding import (
    OpFunction,
    needs_autograd,
    once_differentiable,
    second_backward_is_refused,
)
from ...ops.cross_entropy import (
    REDUCTIONS,
    count_valid,
    cross_entropy_bwd,
    cross_entropy_fwd,
    scale_gradient,
    sum_losses,
)
from ...recipe import Recipe, stateless_recipe
from ...runtime import invariance
from .programs import is_autocast, without_autocast
from .vocabulary_gemms import VocabularyGemms

# Fewer rows make the GEMMs slow: the weight's gradient is read and written for each chunk.
_CHUNK_BYTES, _LARGE_BYTES = 320 << 20, 1 << 30
_LEAST_ROWS, _ROW_MULTIPLE = 256, 128
# Logits that have a float32 copy at a time, of a split vocabulary or with entropies.
_WIDE_ELEMENTS = 1 << 24
_ALIGN, _ENTROPY_ROWS = 8, 64  # of independent rows
_NAME = "head_losses"


def head_losses(
    function: type[VocabularyLosses],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    ignore_index: int,
    fp8_recipe: Recipe | str | None,
    chunk_rows: int | None,
    weight_grad_dtype: torch.dtype | None,
    tp_group: Any,
    first_index: int | None,
    vocab_size: int | None,
    reduction: str = "none",
    label_smoothing: float = 0.0,
    temperature: float = 1.0,
    with_entropies: bool = False,
) -> Any:
    """Returns the losses that ``function`` computes, or a tuple of them and of the entropies.

    Arguments and results are those of ``linear_cross_entropy`` and ``linear_log_probs``, whose
    names errors get from ``named_arguments``.
    """
    given = {"hidden": hidden, "weight": weight, "target": target, "bias": bias}
    for key, value in given.items():
        if not isinstance(value, torch.Tensor) and not (key == "bias" and value is None):
            raise TypeError(f"{_NAME}: {key} must be a torch.Tensor, got {type(value).__name__}")
    device_type = hidden.device.type
    if is_autocast(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        with torch.autocast(device_type, enabled=False):  # the GEMMs choose their own dtypes
            return head_losses(
                function, hidden, weight, target, bias,
                ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction,
                fp8_recipe=fp8_recipe, chunk_rows=chunk_rows, weight_grad_dtype=weight_grad_dtype,
                tp_group=tp_group, first_index=first_index, vocab_size=vocab_size,
                temperature=temperature, with_entropies=with_entropies,
            )  # fmt: skip
    _check(hidden, weight, target, bias, reduction, label_smoothing, chunk_rows)
    sums = hidden.dtype if weight_grad_dtype is None else weight_grad_dtype
    if sums not in (hidden.dtype, torch.float32):
        raise TypeError(
            f"{_NAME}: weight_grad_dtype must be {hidden.dtype} or torch.float32, got {sums}"
        )
    independent_rows = invariance.is_batch_invariant()
    if independent_rows and tp_group is not None:
        raise NotImplementedError(
            f"{_NAME}: tp_group must be None under batch_invariant, got {type(tp_group).__name__}"
        )
    recipe = stateless_recipe(_NAME, "fp8_recipe", fp8_recipe)
    backward = getattr(recipe, "backward", None)
    if backward is not None:
        raise NotImplementedError(
            f"{_NAME}: fp8_recipe must have backward=None, got backward={backward!r}"
        )
    check_process_group(_NAME, "tp_group", tp_group)
    columns = own_columns(_NAME, weight.shape[0], tp_group, first_index, vocab_size)
    ranks = 1 if tp_group is None else world_size(tp_group)
    if chunk_rows is None:  # equal on all ranks, whatever part each has
        words = max(1, -(-columns.vocabulary // ranks))
        size = words * hidden.element_size()
        fitting = _CHUNK_BYTES // size
        if target.numel() * size > _LARGE_BYTES:
            fitting = min(fitting, target.numel() // 8)
        chunk_rows = max(_LEAST_ROWS, fitting // _ROW_MULTIPLE * _ROW_MULTIPLE)
    if ranks == 1:
        columns = Columns(0, len(weight), len(weight), None)
    options = _Options(
        ignore_index, label_smoothing, reduction, recipe, chunk_rows, sums,
        needs_autograd(hidden, weight, bias), columns, temperature, with_entropies,
        independent_rows,
    )  # fmt: skip
    rows = hidden.reshape(target.numel(), hidden.shape[-1]).contiguous()
    found = function.apply(
        rows, weight.contiguous(), bias, target.reshape(-1).contiguous(), options
    )
    if reduction != "none":
        return found
    if not with_entropies:
        return found.view(target.shape)
    return tuple(each.view(target.shape) for each in found)


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    reduction: str,
    label_smoothing: float,
    chunk_rows: int | None,
) -> None:
    """Raises the error of the first argument that does not fit."""
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
    """Checked options of ``head_losses``.

    Attributes:
        weight_grad_dtype: dtype in which the chunks' weight gradients are summed.
        differentiated: autograd may ask for a gradient.
        columns: this rank's part of the vocabulary; its group is None if that is all of it.
        independent_rows: a row's bits do not depend on the other rows.
    """

    ignore_index: int
    label_smoothing: float
    reduction: str
    recipe: Recipe | None
    chunk_rows: int
    weight_grad_dtype: torch.dtype
    differentiated: bool
    columns: Columns
    temperature: float
    with_entropies: bool
    independent_rows: bool

    def head(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        wanted: tuple[bool, bool, bool],
    ) -> VocabularyGemms:
        """Returns the GEMMs of the head."""
        return VocabularyGemms(
            hidden, weight, bias, wanted, self.recipe, self.weight_grad_dtype, self.columns.group,
            self.temperature, self.independent_rows,
        )  # fmt: skip


class VocabularyLosses(OpFunction):
    """Autograd function of ``head_losses``; each public function has a subclass with its name."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        options: _Options,
    ) -> Any:
        """Returns the reduced loss, or the losses of rows, with their entropies if asked for."""
        wanted = (False,) * 3
        if options.differentiated:
            wanted = tuple(ctx.needs_input_grad[:3])
        now = options.reduction != "none" and hidden.dtype is not torch.float16
        tensors = hidden, weight, bias
        head = options.head(*tensors, wanted if now else (False,) * 3)
        rows = len(hidden)
        later = any(wanted) and not now
        losses = hidden.new_empty(rows, dtype=torch.float32)
        entropies = torch.empty_like(losses) if options.with_entropies else None
        stats = None
        if later or entropies is not None:
            stats = hidden.new_empty(rows, 2, dtype=torch.float32)
        num_valid = None
        if options.reduction == "mean":
            num_valid = count_valid(target, options.ignore_index)
        buffer = hidden.new_empty(min(options.chunk_rows, rows), len(weight))
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
            if entropies is not None:
                assert stats is not None
                entropies[begin:end] = _entropies(logits, stats[begin:end], options).masked_fill_(
                    target[begin:end] == options.ignore_index, 0.0
                )
            if now and any(wanted):
                head.add_gradients(begin, end, logits)
        ctx.options, ctx.wanted, ctx.now = options, wanted, now
        ctx.device_type = hidden.device.type
        if later:
            ctx.save_for_backward(*tensors, target, stats, num_valid, entropies)
        elif any(wanted):
            ctx.dtypes = [None if t is None else t.dtype for t in tensors]
            if num_valid is None:
                num_valid = count_valid(target, options.ignore_index)
            ctx.save_for_backward(*head.gradients(), target, num_valid)
            ctx.once = second_backward_is_refused(ctx)
        if options.reduction == "none":
            return losses if entropies is None else (losses, entropies)
        return sum_losses(losses, num_valid if options.reduction == "mean" else None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradients of hidden states, weight and bias."""
        return without_autocast(_backward, ctx, *grads)


def _backward(
    ctx: Any, grad_losses: torch.Tensor, grad_entropies: torch.Tensor | None = None
) -> tuple[torch.Tensor | None, ...]:
    """Does what the ``backward`` of ``VocabularyLosses`` does."""
    factor = grad_losses.reshape(-1).contiguous()
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
        hidden, weight, bias, target, stats, num_valid, entropies = ctx.saved_tensors
        temperature = ctx.options.temperature
        if temperature != 1.0:
            factor = factor / temperature
        pairs = None
        if entropies is not None and grad_entropies is not None:
            pairs = torch.stack((entropies, grad_entropies.reshape(-1) / temperature))
        gradients = _recomputed(
            ctx.options.head(hidden, weight, bias, ctx.wanted),
            target, stats, num_valid, factor, pairs, ctx.options,
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
    if options.independent_rows and grad is None and logits.is_cuda and logits.shape[1] % _ALIGN:
        # The kernel takes elements before an aligned address apart: here rows begin at such.
        width, ignored = logits.shape[1], options.ignore_index
        logits = functional.pad(logits, (0, -width % _ALIGN), value=-torch.inf)
        found = _losses(logits, target, None, stats, num_valid, options)
        return found.masked_fill_((target >= width) & (target != ignored), torch.nan)
    if columns.group is None:
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


def _entropies(logits: torch.Tensor, stats: torch.Tensor, options: _Options) -> torch.Tensor:
    """Returns the entropies of a chunk's rows, float32 ``[rows]``."""
    if not options.independent_rows:
        return split_entropies(logits, stats, options.columns, _WIDE_ELEMENTS)
    # torch.sum chooses its order by the number of rows, always so many here, and by where a row
    # begins, here at an aligned address.
    fill, width = -len(logits) % _ENTROPY_ROWS, logits.shape[1]
    wide = functional.pad(logits, (0, -width % _ALIGN), value=-torch.inf)
    wide, pairs = (functional.pad(x, (0, 0, 0, fill), value=1.0) for x in (wide, stats))
    pieces = zip(wide.split(_ENTROPY_ROWS), pairs.split(_ENTROPY_ROWS), strict=True)
    found = [split_entropies(some, s, options.columns, some.numel()) for some, s in pieces]
    return torch.cat(found)[: len(logits)]


def _gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    stats: torch.Tensor,
    factor: torch.Tensor,
    num_valid: torch.Tensor | None,
    entropies: torch.Tensor | None,
    options: _Options,
) -> None:
    """Overwrites a chunk's logits, this rank's columns, with their gradient.

    ``factor`` is the gradient of the losses, float32, one element or ``[rows]``, and ``entropies``,
    ``[2, rows]``, are those of the rows and their gradients.
    """
    columns, smoothing = options.columns, options.label_smoothing
    if columns.group is None and entropies is None:
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
    targets = split_targets(None, target, columns, options.ignore_index)
    if num_valid is not None:
        factor = factor / num_valid
    split_gradient(
        logits, targets, stats[:, 0], stats[:, 1], factor, smoothing, columns, logits,
        _WIDE_ELEMENTS, entropies,
    )  # fmt: skip


def _recomputed(
    head: VocabularyGemms,
    target: torch.Tensor,
    stats: torch.Tensor,
    num_valid: torch.Tensor | None,
    factor: torch.Tensor,
    entropies: torch.Tensor | None,
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
            None if entropies is None else entropies[:, begin:end],
            options,
        )
        head.add_gradients(begin, end, logits)
    if head.dhidden is not None:
        # Infinite gradients of other rows reach these by a scale that rows share, and by the
        # padding of bfloat16 matmuls on CPUs with matrix units.
        head.dhidden.masked_fill_((target == options.ignore_index).unsqueeze(1), 0.0)
    return head.gradients()
