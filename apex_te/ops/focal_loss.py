"""Sigmoid focal loss of detectors, and its gradient, each from one pass over the logits."""

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
    """Computes the sigmoid focal loss of all logits, divided by a count, differentiably.

    With ``p`` the probability that a logit gives to the wrong answer and ``ce`` its binary cross
    entropy, an element's loss is ``w * p ** gamma * ce``, where ``w`` is ``alpha`` at the target's
    class and ``1 - alpha`` elsewhere. Backward computes the gradient from the logits, rounded once.

    Args:
        logits: [..., C] float32, float16 or bfloat16; made contiguous if it is not.
        target: class of each row, [...] int64. Rows of -2 are ignored; those of -1, or of another
            value outside the classes, have only background.
        num_positives: divides the loss, one float32 element.
        num_classes: number of classes, None for C; later columns of ``logits`` are padding, which
            has no loss and gradient 0.
        alpha: weight of the target's class.
        gamma: exponent, at least 0.
        label_smoothing: in [0, 1]; half of it is the label of the background, and 1 less half of it
            that of the target's class.

    Returns:
        float32 [], summed in a fixed order.

    Raises:
        TypeError: a tensor has another dtype than those above.
        ValueError: a shape or a number does not fit.
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
    """Computes ``focal_loss`` and the gradient of its sum, without the division by the count.

    Args:
        logits, target, num_positives, num_classes, alpha, gamma, label_smoothing: as in
            ``focal_loss``.
        with_grad: False to leave the gradient out.

    Returns:
        (loss, float32 [], gradient like ``logits`` for ``focal_loss_scale`` or None).

    Raises:
        TypeError: a tensor has another dtype than those of ``focal_loss``.
        ValueError: a shape or a number does not fit.
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
    """Computes the gradient of ``focal_loss``, times ``grad_output``, one float32 element.

    The other arguments are those of ``focal_loss``, as are the errors. Returns a contiguous tensor
    of ``logits``' shape and dtype.
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
    """Multiplies the gradient of ``focal_loss_fwd`` in place by ``grad_output / num_positives``.

    Args:
        grad: [..., C] float32, float16 or bfloat16, contiguous; is written.
        grad_output, num_positives: one float32 element each.

    Returns:
        ``grad``.

    Raises:
        TypeError: a tensor has another dtype than those above.
        ValueError: ``grad`` is not contiguous, or another tensor has several elements.
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
    """Computes ``focal_loss`` in plain PyTorch in the dtype of ``logits``, differentiably."""
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
