"""Softmax cross entropy whose forward also makes the gradient, from one read of the logits."""

from __future__ import annotations

from typing import Any

import torch

from .registration import bind, note_written

_fwd = bind(
    "cross_entropy",
    "cross_entropy_fwd(Tensor logits, Tensor target, Tensor(a!) loss, Tensor(b!)? grad, "
    "Tensor? num_valid, int ignore_index, float label_smoothing) -> ()",
)
_count = bind(
    "cross_entropy",
    "cross_entropy_count(Tensor target, Tensor(a!) num_valid, int ignore_index) -> ()",
)
_sum = bind(
    "cross_entropy",
    "cross_entropy_sum(Tensor loss, Tensor? num_valid, Tensor(a!) total) -> ()",
)
_bwd = bind("cross_entropy", "cross_entropy_bwd(Tensor(a!) grad, Tensor grad_output) -> ()")

_REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    overwrite_logits: bool = False,
) -> torch.Tensor:
    """Cross entropy between softmax(logits) and target indices, as torch.nn.functional's.

    The forward pass writes the gradient while it has the row, so backward only multiplies it by
    the incoming gradient, and touches nothing where that is 1. As backward does so in place, it
    may run once.

    Args:
        logits: [..., V] float32, float16 or bfloat16.
        target: [...] int64 or int32; an index outside [0, V) that is not `ignore_index` raises on
            the CPU and gives NaN on the GPU, which is not waited for.
        ignore_index: rows with this target have loss 0 and gradient 0 and do not count.
        label_smoothing: in [0, 1], share of the target's probability spread over all V.
        reduction: "mean" over rows that are not ignored, "sum" or "none".
        overwrite_logits: put the gradient into the logits' memory, which then hold no logits.

    Returns:
        float32: one element, or with "none" the shape of `target`.

    Raises:
        TypeError, ValueError: a dtype, shape or option that does not match.
    """
    if reduction not in _REDUCTIONS:
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


def cross_entropy_fwd(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    grad: torch.Tensor | None = None,
    num_valid: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Losses of rows, [rows] float32, and their gradient into `grad` where it is given.

    Args:
        logits: [rows, V] float32, float16 or bfloat16, contiguous.
        target: [rows] int64 or int32, contiguous.
        grad: like `logits`, and may be `logits`.
        num_valid: one int32 element by which the gradient is divided.
        ignore_index: as in `cross_entropy`.
        label_smoothing: as in `cross_entropy`.
    """
    loss = logits.new_empty(target.shape, dtype=torch.float32)
    _fwd(logits, target, loss, grad, num_valid, ignore_index, label_smoothing)
    note_written(grad)
    return loss


def count_valid(target: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """Number of targets other than `ignore_index`: one int32 element on target's device."""
    num_valid = target.new_empty(1, dtype=torch.int32)
    _count(target, num_valid, ignore_index)
    return num_valid


class _CrossEntropy(torch.autograd.Function):
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
        grad = None
        if ctx.needs_input_grad[0]:
            # A compiler plans memory itself, and an input written there would be copied back.
            in_place = overwrite_logits and not torch.compiler.is_compiling()
            grad = rows if in_place else torch.empty_like(rows)
        num_valid = count_valid(targets, ignore_index) if reduction == "mean" else None
        loss = cross_entropy_fwd(
            rows,
            targets,
            grad=grad,
            num_valid=num_valid,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
        )
        if grad is not None:
            ctx.save_for_backward(grad)
            ctx.shape = logits.shape
        if reduction == "none":
            return loss.view(target.shape)
        total = loss.new_empty(())
        _sum(loss, num_valid, total)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        _bwd(grad, grad_output.reshape(-1).contiguous())
        # A second backward would multiply again: autograd sees the change and refuses.
        note_written(grad)
        return grad.view(ctx.shape), None, None, None, None, None


def reference(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and gradients of rows, without reduction, in plain PyTorch in the logits' dtype."""
    columns = logits.shape[-1]
    log_p = torch.log_softmax(logits, dim=-1)
    ignored = target == ignore_index
    index = target.masked_fill(ignored, 0).long().unsqueeze(-1)
    nll = -log_p.gather(-1, index).squeeze(-1)
    loss = (1 - label_smoothing) * nll - label_smoothing * log_p.mean(-1)
    hot = torch.zeros_like(log_p).scatter_(-1, index, 1.0)
    grad = log_p.exp() - (1 - label_smoothing) * hot - label_smoothing / columns
    return loss.masked_fill(ignored, 0.0), grad.masked_fill(ignored.unsqueeze(-1), 0.0)
