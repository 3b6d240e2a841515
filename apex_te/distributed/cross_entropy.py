"""Softmax cross entropy of logits whose vocabulary is split over the ranks of a group."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from torch.autograd.function import once_differentiable

from ..comm.collectives import world_size
from ..comm.groups import check_process_group
from ..ops.cross_entropy import cross_entropy, cross_entropy_fwd

__all__ = ["parallel_cross_entropy"]

_NAME = "parallel_cross_entropy"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Logits that have a float32 copy at a time in backward.
_WIDE_ELEMENTS = 1 << 26


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
    """Computes the cross entropy of softmax(logits) where each rank has some of the columns.

    The ranks exchange three float32 numbers for each row: one all-reduce by maximum and one by sum
    in forward, nothing in backward. Backward reads the logits, which must not be changed before.

    Args:
        logits: [..., V] float32, float16 or bfloat16, this rank's columns of the vocabulary.
        target: [...] int64 or int32, indices into the whole vocabulary, equal on all ranks. One
            outside the vocabulary that is not ``ignore_index`` raises on the CPU and gives NaN on
            the GPU, which is not waited for.
        group: process group of the ranks; None: this rank has the whole vocabulary.
        ignore_index: rows with this target have loss 0 and gradient 0 and do not count.
        label_smoothing: in [0, 1], share of the target's probability spread over the vocabulary.
        reduction: "mean" over rows that are not ignored, "sum" or "none".
        first_index: index in the vocabulary of this rank's first column; None: all ranks have as
            many columns, in the order of ranks.
        vocab_size: number of columns of all ranks; to be given with ``first_index``.

    Returns:
        The loss in float32, equal on all ranks: a scalar, or with "none" the losses in the shape of
        ``target``.

    Raises:
        TypeError: a dtype that does not match, or ``group`` is no process group.
        ValueError: a shape, index or option that does not match.
    """
    check_process_group(_NAME, "group", group)
    _check(logits, target, label_smoothing, reduction, first_index, vocab_size)
    ranks = 1 if group is None else world_size(group)
    if ranks == 1:
        return cross_entropy(
            logits,
            target,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
        )
    columns = logits.shape[-1]
    if first_index is None or vocab_size is None:
        first_index, vocab_size = distributed.get_rank(group) * columns, ranks * columns
    targets = target.reshape(-1).long()
    ignored = targets == ignore_index
    invalid = ~ignored & ((targets < 0) | (targets >= vocab_size))
    if invalid.device.type == "cpu" and bool(invalid.any()):
        raise ValueError(
            f"{_NAME}: target must be in [0, {vocab_size}) or ignore_index {ignore_index}, "
            f"got {int(targets[invalid][0])}"
        )
    losses = _SplitCrossEntropy.apply(
        logits, targets - first_index, ignored, label_smoothing, vocab_size, group
    )
    losses = losses.masked_fill(invalid, float("nan"))
    if reduction == "none":
        return losses.view(target.shape)
    total = losses.sum()
    return total / (~ignored).sum() if reduction == "mean" else total


def _check(
    logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float,
    reduction: str,
    first_index: int | None,
    vocab_size: int | None,
) -> None:
    """Raises TypeError or ValueError for wrong arguments of ``parallel_cross_entropy``."""
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
    if (first_index is None) != (vocab_size is None):
        raise ValueError(
            f"{_NAME}: vocab_size must be given with first_index and only then, "
            f"got {vocab_size} and {first_index}"
        )
    if first_index is not None and vocab_size is not None:
        last = vocab_size - logits.shape[-1]
        if not 0 <= first_index <= last:
            raise ValueError(
                f"{_NAME}: first_index must be from 0 to {last} for {logits.shape[-1]} columns of "
                f"{vocab_size}, got {first_index}"
            )


class _SplitCrossEntropy(torch.autograd.Function):
    """Autograd function for the losses of the rows, [rows] float32."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        local: torch.Tensor,
        ignored: torch.Tensor,
        label_smoothing: float,
        vocab_size: int,
        group: Any,
    ) -> torch.Tensor:
        """Computes the losses.

        Args:
            ctx: context of autograd.
            logits: [..., V], this rank's columns.
            local: [rows], targets counted from this rank's first column.
            ignored: [rows] bool, True for a row without loss.
            label_smoothing, vocab_size, group: as for ``parallel_cross_entropy``.
        """
        columns = logits.shape[-1]
        rows = logits.detach().reshape(-1, columns).contiguous()
        own = (local >= 0) & (local < columns) & ~ignored
        index = local.clamp(0, columns - 1).unsqueeze(1)
        largest, sums = _local_sums(rows, own, index, label_smoothing > 0)
        overall = largest.clone()
        distributed.all_reduce(overall, op=distributed.ReduceOp.MAX, group=group)
        # A rank whose logits are all -inf adds nothing, and would give exp(-inf + inf).
        weight = torch.where(largest == -torch.inf, 0.0, (largest - overall).exp())
        sums[0] = torch.where(largest == -torch.inf, 0.0, sums[0] * weight)
        distributed.all_reduce(sums, group=group)
        log_sum = sums[0].log() + overall
        loss = (1.0 - label_smoothing) * (log_sum - sums[1])
        if label_smoothing:
            loss += label_smoothing * (log_sum - sums[2] / vocab_size)
        ctx.save_for_backward(rows, own, index, ignored, overall, sums[0])
        ctx.options = label_smoothing, vocab_size, logits.shape
        return loss.masked_fill_(ignored, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, own, index, ignored, overall, exp_sum = ctx.saved_tensors
        label_smoothing, vocab_size, shape = ctx.options
        factor = grad_losses.float().masked_fill(ignored, 0.0).unsqueeze(1)
        grad = torch.empty_like(rows)
        count = max(1, _WIDE_ELEMENTS // max(1, rows.shape[1]))
        for start in range(0, len(rows), count):
            part = slice(start, start + count)
            f = factor[part]
            wide = (rows[part].float() - overall[part].unsqueeze(1)).exp_()
            wide.mul_(f / exp_sum[part].unsqueeze(1))
            if label_smoothing:
                wide.sub_(f * (label_smoothing / vocab_size))
            hot = torch.where(own[part].unsqueeze(1), f * (1.0 - label_smoothing), 0.0)
            wide.scatter_(1, index[part], wide.gather(1, index[part]) - hot)
            grad[part] = wide.masked_fill_(ignored[part].unsqueeze(1), 0.0)
        return grad.view(shape), None, None, None, None, None


def _local_sums(
    rows: torch.Tensor, own: torch.Tensor, index: torch.Tensor, with_sum: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what this rank's columns contribute to the losses.

    Args:
        rows: [rows, V], the logits.
        own: [rows] bool, True where this rank has the target's column.
        index: [rows, 1], that column, or any column where ``own`` is False.
        with_sum: compute the sums of logits, too.

    Returns:
        largest: [rows] float32, the largest logit of each row.
        sums: [3, rows] float32: the sum of exp(logit - largest), the target's logit or 0, and the
            sum of the logits or 0.
    """
    stats = rows.new_empty(len(rows), 2, dtype=torch.float32)
    # The op leaves ignored rows out; here the statistics of all rows are wanted, for any target.
    anything = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    cross_entropy_fwd(rows, anything, stats=stats, ignore_index=-1)
    sums = rows.new_zeros(3, len(rows), dtype=torch.float32)
    sums[0] = stats[:, 1]
    sums[1] = torch.where(own, rows.gather(1, index).squeeze(1).float(), 0.0)
    if with_sum:
        sums[2] = rows.sum(1, dtype=torch.float32)
    return stats[:, 0].contiguous(), sums
