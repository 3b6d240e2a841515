"""Sigmoid focal loss for object detection and its gradient, each in one pass over the logits."""

from __future__ import annotations

from typing import Any

import torch

from .binding import OpFunction, bind, checked, note_written, once_differentiable

_TILE = 8192  # elements whose losses one element of the workspace sums
_IGNORED = -2

_fwd = bind("focal_loss", "focal_loss_fwd")
_bwd = bind("focal_loss", "focal_loss_bwd")
_scale = bind("focal_loss", "focal_loss_scale")


@checked
def focal_loss(
    logits: torch.Tensor,
    target: torch.Tensor,
    num_positives: torch.Tensor,
    num_classes: int | None = None,
    alpha: float = 0.25,
    gamma: float = 2.0,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Computes the sum of the sigmoid focal loss over all logits, divided by ``num_positives``.

    An element's loss is ``w * p ** gamma * ce``, where ``p`` is the probability that its logit
    gives to the wrong answer, ``ce`` is its binary cross entropy, and ``w`` is ``alpha`` at the
    target's class and ``1 - alpha`` elsewhere. It is differentiable; backward recomputes the
    gradient from the logits and rounds it once.

    Args:
        logits: [..., C] float32, float16 or bfloat16; made contiguous if it is not.
        target: int64 [...], the class of each row. Rows of -2 are ignored; -1 or any other value
            outside the classes marks a row that is all background.
        num_positives: one float32 element, the divisor of the loss.
        num_classes: number of classes; None for C. Later columns of ``logits`` are padding: they
            add no loss and have gradient 0.
        alpha: weight of the target's class.
        gamma: exponent, at least 0.
        label_smoothing: s in [0, 1]: labels are ``s / 2`` for the background and ``1 - s / 2`` for
            the target's class.

    Returns:
        A float32 scalar, summed in a fixed order.

    Raises:
        TypeError: a tensor has another dtype than those above.
        ValueError: a shape does not match, or a number is out of range.
    """
    options = num_classes, alpha, gamma, label_smoothing
    return FocalLossFunction.apply(logits, target, num_positives, *options)


@checked
def focal_loss_fwd(
    logits: torch.Tensor,
    target: torch.Tensor,
    num_positives: torch.Tensor,
    num_classes: int | None = None,
    alpha: float = 0.25,
    gamma: float = 2.0,
    label_smoothing: float = 0.0,
    *,
    with_grad: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes ``focal_loss`` and the gradient of its undivided sum.

    Args:
        logits, target, num_positives, num_classes, alpha, gamma, label_smoothing: as in
            ``focal_loss``: logits [..., C] float32, float16 or bfloat16, target [...] int64,
            num_positives one float32 element.
        with_grad: False skips the gradient.

    Returns:
        (loss, grad): a float32 scalar, divided by ``num_positives``; and the gradient of the sum,
        in the shape and dtype of ``logits``, to pass to ``focal_loss_scale``, or None.

    Raises:
        TypeError: a tensor has another dtype than those above.
        ValueError: a shape does not match, or a number is out of range.
    """
    rows, targets, classes = _rows("focal_loss_fwd", logits, target, num_classes)
    grad = torch.empty_like(rows) if with_grad else None
    loss = rows.new_empty((), dtype=torch.float32)
    workspace = rows.new_empty(-(-rows.numel() // _TILE), dtype=torch.float32)
    options = classes, alpha, gamma, label_smoothing
    _fwd(rows, targets, num_positives, loss, grad, workspace, *options)
    return loss, None if grad is None else grad.view(logits.shape)


@checked
def focal_loss_bwd(
    logits: torch.Tensor,
    target: torch.Tensor,
    num_positives: torch.Tensor,
    grad_output: torch.Tensor,
    num_classes: int | None = None,
    alpha: float = 0.25,
    gamma: float = 2.0,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Computes the gradient of ``focal_loss`` with respect to the logits, times ``grad_output``.

    Args:
        logits: [..., C] float32, float16 or bfloat16; made contiguous if it is not.
        target: int64 [...].
        num_positives, grad_output: one float32 element each.
        num_classes, alpha, gamma, label_smoothing: as passed to ``focal_loss``.

    Returns:
        A contiguous tensor in the shape and dtype of ``logits``.

    Raises:
        TypeError: a tensor has another dtype than those above.
        ValueError: a shape does not match, or a number is out of range.
    """
    rows, targets, classes = _rows("focal_loss_bwd", logits, target, num_classes)
    grad = torch.empty_like(rows)
    options = classes, alpha, gamma, label_smoothing
    _bwd(rows, targets, num_positives, grad_output, grad, *options)
    return grad.view(logits.shape)


@checked
def focal_loss_scale(
    grad: torch.Tensor, grad_output: torch.Tensor, num_positives: torch.Tensor
) -> torch.Tensor:
    """Multiplies the gradient from ``focal_loss_fwd`` by ``grad_output / num_positives`` in place.

    Args:
        grad: [..., C] float32, float16 or bfloat16, contiguous; overwritten.
        grad_output, num_positives: one float32 element each.

    Returns:
        ``grad``.

    Raises:
        TypeError: a tensor has another dtype than those above.
        ValueError: ``grad`` is not contiguous, or another tensor does not have one element.
    """
    _scale(grad.view(1, -1), grad_output, num_positives)
    note_written(grad)
    return grad


def _rows(
    owner: str, logits: torch.Tensor, target: torch.Tensor, num_classes: int | None
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Returns the logits [rows, C] and targets [rows], contiguous, and the number of classes."""
    if logits.dim() == 0:
        raise ValueError(f"{owner}: logits must have at least 1 dimension, got shape []")
    if target.shape != logits.shape[:-1]:
        raise ValueError(
            f"{owner}: target must have shape {list(logits.shape[:-1])}, got {list(target.shape)}"
        )
    rows = logits.reshape(target.numel(), logits.shape[-1]).contiguous()
    return (
        rows,
        target.reshape(-1).contiguous(),
        rows.shape[1] if num_classes is None else num_classes,
    )


class FocalLossFunction(OpFunction):
    """Autograd function of ``focal_loss``, with its arguments in their order."""

    LABEL = "focal_loss"

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        num_positives: torch.Tensor,
        num_classes: int | None,
        alpha: float,
        gamma: float,
        label_smoothing: float = 0.0,
    ) -> torch.Tensor:
        ctx.options = num_classes, alpha, gamma, label_smoothing
        loss, _ = focal_loss_fwd(logits, target, num_positives, *ctx.options, with_grad=False)
        ctx.save_for_backward(logits, target, num_positives, loss)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, target, count, loss = ctx.saved_tensors
        grad = grad_count = None
        if ctx.needs_input_grad[0]:
            grad = focal_loss_bwd(logits, target, count, grad_output.contiguous(), *ctx.options)
        if ctx.needs_input_grad[2]:
            grad_count = -grad_output * loss / count
        return grad, None, grad_count, None, None, None, None


def reference(
    logits: torch.Tensor,
    target: torch.Tensor,
    num_positives: torch.Tensor,
    num_classes: int | None = None,
    alpha: float = 0.25,
    gamma: float = 2.0,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Computes ``focal_loss`` in plain PyTorch in the dtype of ``logits``, differentiably.

    ``logits`` is [..., C] in any floating-point dtype, ``target`` int64 [...], and
    ``num_positives`` one element; other arguments are as in ``focal_loss``. Returns a scalar.
    """
    x = logits[..., :num_classes]
    is_target = torch.arange(x.shape[-1], device=x.device) == target[..., None]
    label = is_target * (1 - label_smoothing) + label_smoothing / 2
    ce = torch.nn.functional.binary_cross_entropy_with_logits(
        x, label.to(x.dtype), reduction="none"
    )
    wrong = torch.where(is_target, -x, x).sigmoid()
    weight = is_target * alpha + ~is_target * (1 - alpha)
    losses = weight.to(x.dtype) * wrong**gamma * ce
    total = losses.masked_fill(target[..., None] == _IGNORED, 0).sum()
    return total / num_positives.to(x.dtype).reshape(())
