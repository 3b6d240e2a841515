"""Softmax cross entropy, whose gradient is computed with the loss or later from the logits.

With reduction "mean" and float32 or bfloat16 logits the forward pass also computes the gradient of
the logits while it has them loaded; the incoming gradient is then mostly 1, and backward has
nothing left to do. Otherwise backward computes the gradient, times the incoming one, from the
logits and two float32 numbers for each row: float16 gradients would vanish before a loss scale
multiplied them, and those of sums and single losses are mostly multiplied by something.
"""

from __future__ import annotations

from typing import Any

import torch

from .binding import (
    OpFunction,
    bind,
    checked,
    note_written,
    once_differentiable,
    second_backward_is_refused,
)

_fwd = bind("cross_entropy", "cross_entropy_fwd")
_bwd = bind("cross_entropy", "cross_entropy_bwd")
_count = bind("cross_entropy", "cross_entropy_count")
_sum = bind("cross_entropy", "cross_entropy_sum")
_scale = bind("cross_entropy", "cross_entropy_scale")

REDUCTIONS = ("mean", "sum", "none")


@checked
def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    overwrite_logits: bool = False,
) -> torch.Tensor:
    """Computes the cross entropy of softmax(logits) and targets, as ``torch.nn.functional`` does.

    Do not change the logits before backward. Backward computes their gradient from them, multiplies
    it by the incoming gradient in float32 and rounds once to the dtype of the logits, so that a
    loss scale keeps float16 gradients from vanishing.

    Exception: with reduction "mean" and float32 or bfloat16 logits, forward stores the gradient for
    an incoming gradient of 1, and backward may run only once. If the incoming gradient is 1,
    backward returns the stored one. Otherwise it computes as above, or with ``overwrite_logits``
    multiplies the stored gradient, which rounds twice.

    Args:
        logits: [..., V] float32, float16 or bfloat16.
        target: [...] int64 or int32. An index outside [0, V) other than ``ignore_index`` raises
            ValueError on the CPU. On the GPU it gives NaN, because the host does not wait for the
            GPU.
        ignore_index: rows with this target have loss 0 and gradient 0 and do not count in the mean.
        label_smoothing: in [0, 1], the part of the target's probability that is spread over all V.
        reduction: "mean" over rows that are not ignored, "sum" or "none".
        overwrite_logits: write the gradient to the memory of the logits, whose values are lost. The
            logits must be contiguous, and backward may run only once. torch.compile ignores it.

    Returns:
        The loss in float32: a scalar, or with "none" one loss per row, in the shape of ``target``.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or option does not match, or logits to overwrite are not contiguous.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"cross_entropy: reduction must be 'mean', 'sum' or 'none', got {reduction!r}"
        )
    if logits.dim() < 1 or logits.shape[:-1] != target.shape:
        raise ValueError(
            f"cross_entropy: target must have the shape of logits without the last dimension, "
            f"{list(logits.shape[:-1])}, got {list(target.shape)}"
        )
    if overwrite_logits and not logits.is_contiguous():
        raise ValueError(
            "cross_entropy: logits must be contiguous to be overwritten, got strides "
            f"{list(logits.stride())}"
        )
    loss = _CrossEntropy.apply(
        logits, target, ignore_index, label_smoothing, reduction, overwrite_logits
    )
    return loss


@checked
def cross_entropy_fwd(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    grad: torch.Tensor | None = None,
    stats: torch.Tensor | None = None,
    num_valid: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Computes the loss of each row, and writes the gradient of the logits if ``grad`` is given.

    Args:
        logits: [rows, V] float32, float16 or bfloat16, contiguous.
        target: [rows] int64 or int32, contiguous.
        grad: contiguous tensor of the shape and dtype of ``logits`` to write; may be ``logits``.
        stats: [rows, 2] float32, written for ``cross_entropy_bwd``: the largest logit of each row
            and the sum of exp(logit - largest).
        num_valid: one int32 element by which the gradient is divided; None does not divide.
        ignore_index, label_smoothing: as in ``cross_entropy``.

    Returns:
        The losses, float32 [rows].

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or option does not match, or, on the CPU, a target is out of range.
    """
    loss = logits.new_empty(target.shape, dtype=torch.float32)
    _fwd(logits, target, loss, grad, stats, num_valid, ignore_index, label_smoothing)
    note_written(grad, stats)
    return loss


@checked
def cross_entropy_bwd(
    logits: torch.Tensor,
    target: torch.Tensor,
    stats: torch.Tensor,
    grad_output: torch.Tensor,
    grad: torch.Tensor,
    *,
    num_valid: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    made: bool = False,
) -> torch.Tensor:
    """Writes ``grad_output`` times the gradient of the losses into ``grad``, and returns it.

    Each element is computed in float32 and rounded once.

    Args:
        logits: [rows, V] float32, float16 or bfloat16, contiguous.
        target: [rows] int64 or int32, contiguous.
        stats: [rows, 2] float32, written by ``cross_entropy_fwd`` for these logits.
        grad_output: gradient of the losses, float32, one element or [rows].
        grad: contiguous tensor of the shape and dtype of ``logits`` to write; may be ``logits``.
        num_valid: one int32 element by which the gradient is divided; None does not divide.
        ignore_index, label_smoothing: as in ``cross_entropy``.
        made: True if ``grad`` already contains what ``cross_entropy_fwd`` wrote for the same
            arguments. Then ``grad_output`` must have one element; if it is 1, nothing is written.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or option does not match.
    """
    _bwd(logits, target, stats, grad_output, grad, num_valid, ignore_index, label_smoothing, made)
    note_written(grad)
    return grad


@checked
def count_valid(target: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """Returns the number of targets other than ``ignore_index``, one int32 element.

    ``target`` is int64 or int32 [rows].
    """
    num_valid = target.new_empty(1, dtype=torch.int32)
    _count(target, num_valid, ignore_index)
    return num_valid


@checked
def sum_losses(loss: torch.Tensor, num_valid: torch.Tensor | None = None) -> torch.Tensor:
    """Sums losses in a fixed order, and divides by ``num_valid`` if it is given.

    Args:
        loss: float32 [rows].
        num_valid: one int32 element, as ``count_valid`` returns it.

    Returns:
        A float32 scalar.
    """
    total = loss.new_empty(())
    _sum(loss, num_valid, total)
    return total


@checked
def scale_gradient(
    grad: torch.Tensor,
    grad_output: torch.Tensor,
    *,
    target: torch.Tensor | None = None,
    num_valid: torch.Tensor | None = None,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Multiplies ``grad`` in place by ``grad_output``, one element; a factor of 1 writes nothing.

    Rows whose ``target`` is ``ignore_index`` and, if ``num_valid`` is 0, all of ``grad`` are not
    changed, even if ``grad_output`` is infinite or NaN. ``grad`` is contiguous, [rows, columns]
    with ``target``.
    """
    rows = grad if grad.dim() == 2 else grad.view(1, -1)
    _scale(rows, grad_output, target, num_valid, ignore_index)
    note_written(grad)
    return grad


class _CrossEntropy(OpFunction):
    LABEL = "cross_entropy"

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        ignore_index: int,
        label_smoothing: float,
        reduction: str,
        overwrite_logits: bool,
    ) -> torch.Tensor:
        rows = logits.detach().reshape(target.numel(), logits.shape[-1]).contiguous()
        targets = target.reshape(-1).contiguous()
        grad = stats = None
        ctx.with_scale = False
        if ctx.needs_input_grad[0]:
            # A compiler plans memory itself, and an input written there would be copied back.
            in_place = overwrite_logits and not torch.compiler.is_compiling()
            if reduction == "mean" and logits.dtype is not torch.float16:
                grad = rows if in_place else torch.empty_like(rows)
                ctx.with_scale = in_place
            if not ctx.with_scale:
                stats = rows.new_empty(len(rows), 2, dtype=torch.float32)
            ctx.in_place = in_place
        num_valid = count_valid(targets, ignore_index) if reduction == "mean" else None
        loss = cross_entropy_fwd(
            rows, targets, grad=grad, stats=stats, num_valid=num_valid, ignore_index=ignore_index,
            label_smoothing=label_smoothing,
        )  # fmt: skip
        if ctx.with_scale:
            ctx.save_for_backward(grad, targets)
            ctx.options = ignore_index, label_smoothing
        elif stats is not None:
            ctx.save_for_backward(rows, targets, stats, num_valid, grad)
            ctx.options = ignore_index, label_smoothing
        ctx.shape = logits.shape
        ctx.once = second_backward_is_refused(ctx)
        if reduction == "none":
            return loss.view(target.shape)
        return sum_losses(loss, num_valid)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        factor = grad_output.reshape(-1).contiguous()
        # A second backward would find what this one writes over: autograd sees it and refuses, or
        # else this one writes to copies.
        if ctx.with_scale:
            made, targets = ctx.saved_tensors
            grad = scale_gradient(
                made if ctx.once else made.clone(),
                factor,
                target=targets,
                ignore_index=ctx.options[0],
            )
        else:
            rows, targets, stats, num_valid, made = ctx.saved_tensors
            ignore_index, label_smoothing = ctx.options
            if made is None:
                grad = rows if ctx.in_place and ctx.once else torch.empty_like(rows)
            else:
                grad = made if ctx.once else made.clone()
            cross_entropy_bwd(
                rows, targets, stats, factor, grad, num_valid=num_valid, ignore_index=ignore_index,
                label_smoothing=label_smoothing, made=made is not None,
            )  # fmt: skip
        return grad.view(ctx.shape), None, None, None, None, None


def reference(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes unreduced losses and the logits' gradients in plain PyTorch, in their dtype.

    ``logits`` is [..., V] and ``target`` [...] int64 or int32. Returns (losses [...], gradients
    [..., V]).
    """
    columns = logits.shape[-1]
    log_p = torch.log_softmax(logits, dim=-1)
    ignored = target == ignore_index
    index = target.masked_fill(ignored, 0).long().unsqueeze(-1)
    nll = -log_p.gather(-1, index).squeeze(-1)
    loss = (1 - label_smoothing) * nll - label_smoothing * log_p.mean(-1)
    hot = torch.zeros_like(log_p).scatter_(-1, index, 1.0)
    grad = log_p.exp() - (1 - label_smoothing) * hot - label_smoothing / columns
    return loss.masked_fill(ignored, 0.0), grad.masked_fill(ignored.unsqueeze(-1), 0.0)
