"""Softmax cross entropy of logits whose vocabulary is split over the ranks of a group."""

from __future__ import annotations

from typing import Any

import torch

from ..comm.collectives import world_size
from ..comm.groups import check_process_group
from ..comm.split_cross_entropy import (
    Columns,
    SplitTargets,
    own_columns,
    split_gradient,
    split_losses,
    split_targets,
)
from ..ops.binding import check_dense, once_differentiable
from ..ops.cross_entropy import cross_entropy
from ..runtime.named_arguments import named_arguments

_NAME = "parallel_cross_entropy"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@named_arguments()
def parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    group: Any = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    first_index: int | None = None,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """Computes the cross entropy of softmax(logits) with the vocabulary split over ranks.

    The ranks exchange three float32 numbers per row: one all-reduce by maximum and one by sum in
    forward, nothing in backward. Backward reads the logits; do not change them before.

    Args:
        logits: [..., V] float32, float16 or bfloat16, this rank's columns of the vocabulary.
        target: [...] int64 or int32, indices into the whole vocabulary, equal on all ranks. An
            index outside the vocabulary that is not ``ignore_index`` raises ValueError on the CPU.
            On a GPU its loss is NaN, because the check would make the host wait.
        group: process group of the ranks; None if this rank has the whole vocabulary.
        ignore_index: rows with this target have loss 0 and gradient 0, and "mean" does not count
            them.
        label_smoothing: in [0, 1], fraction of the target's probability spread over the vocabulary.
        reduction: "mean" over the rows that are not ignored, "sum" or "none".
        first_index: vocabulary index of this rank's first column. None if all ranks have equally
            many columns, in rank order.
        vocab_size: total number of columns; required with ``first_index``, and must be None without
            it.

    Returns:
        The loss in float32, equal on all ranks: a scalar, or with "none" one loss for each target,
        in the shape of ``target``.

    Raises:
        TypeError: an argument has a wrong dtype, or ``group`` is not a process group.
        ValueError: a shape does not match, or an index or option is out of range.
    """
    check_process_group(_NAME, "group", group)
    _check(logits, target, label_smoothing, reduction)
    columns = own_columns(_NAME, logits.shape[-1], group, first_index, vocab_size)
    ranks = 1 if group is None else world_size(group)
    if ranks == 1:
        return cross_entropy(
            logits,
            target,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
        )
    targets = split_targets(_NAME, target.reshape(-1), columns, ignore_index)
    losses = _SplitCrossEntropy.apply(logits, targets, label_smoothing, columns)
    if reduction == "none":
        return losses.view(target.shape)
    total = losses.sum()
    return total / (~targets.ignored).sum() if reduction == "mean" else total


def _check(
    logits: torch.Tensor, target: torch.Tensor, label_smoothing: float, reduction: str
) -> None:
    """Raises TypeError or ValueError for wrong arguments of ``parallel_cross_entropy``."""
    for name, value in (("logits", logits), ("target", target)):
        if value is None:
            raise TypeError(f"{_NAME}: {name} must be a torch.Tensor, got None")
    check_dense(_NAME, logits=logits, target=target)
    if logits.dtype not in _DTYPES:
        raise TypeError(f"{_NAME}: logits must be float32, float16 or bfloat16, got {logits.dtype}")
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{_NAME}: target must be int64 or int32, got {target.dtype}")
    if logits.dim() < 1 or logits.shape[:-1] != target.shape:
        raise ValueError(
            f"{_NAME}: target must have the shape of logits without the last dimension, "
            f"{list(logits.shape[:-1])}, got {list(target.shape)}"
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{_NAME}: label_smoothing must be from 0 to 1, got {label_smoothing}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{_NAME}: reduction must be 'mean', 'sum' or 'none', got {reduction!r}")


class _SplitCrossEntropy(torch.autograd.Function):
    """Autograd function for the losses of the rows, [rows] float32."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: SplitTargets,
        label_smoothing: float,
        columns: Columns,
    ) -> torch.Tensor:
        """Computes the losses from ``logits``, this rank's columns ``[..., V]``."""
        rows = logits.detach().reshape(-1, columns.width).contiguous()
        losses, largest, exp_sum = split_losses(rows, targets, label_smoothing, columns)
        ctx.save_for_backward(rows, largest, exp_sum, *targets)
        ctx.options = label_smoothing, columns, logits.shape
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, largest, exp_sum, *targets = ctx.saved_tensors
        label_smoothing, columns, shape = ctx.options
        grad = torch.empty_like(rows)
        split_gradient(
            rows, SplitTargets(*targets), largest, exp_sum, grad_losses, label_smoothing, columns,
            grad,
        )  # fmt: skip
        return grad.view(shape), None, None, None
