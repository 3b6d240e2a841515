"""Losses and gradients of logits whose columns, the vocabulary, are split over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import distributed

from ..ops.cross_entropy import cross_entropy_fwd
from .collectives import world_size


class Columns(NamedTuple):
    """Columns on one rank: ``width``, starting at ``first``, of ``vocabulary`` columns in all."""

    first: int
    width: int
    vocabulary: int
    group: Any


class SplitTargets(NamedTuple):
    """Targets of rows, for a rank that has some of the columns.

    Attributes:
        column: ``[rows, 1]`` int64, the target's column on this rank; an arbitrary column if
            ``own`` is False.
        own: ``[rows]`` bool, True if this rank has the target's column.
        ignored: ``[rows]`` bool, True for rows without loss.
        invalid: ``[rows]`` bool, True for targets outside of the vocabulary.
    """

    column: torch.Tensor
    own: torch.Tensor
    ignored: torch.Tensor
    invalid: torch.Tensor


def own_columns(
    name: str, count: int, group: Any, first_index: int | None, vocab_size: int | None
) -> Columns:
    """Returns this rank's columns; without ``first_index``, all ranks have equal shares."""
    if (first_index is None) != (vocab_size is None):
        raise ValueError(
            f"{name}: vocab_size must be given with first_index and only then, "
            f"got {vocab_size} and {first_index}"
        )
    if first_index is None or vocab_size is None:
        ranks = 1 if group is None else world_size(group)
        rank = 0 if ranks == 1 else distributed.get_rank(group)
        return Columns(rank * count, count, ranks * count, group)
    last = vocab_size - count
    if not 0 <= first_index <= last:
        raise ValueError(
            f"{name}: first_index must be from 0 to {last} for {count} columns of "
            f"{vocab_size}, got {first_index}"
        )
    return Columns(first_index, count, vocab_size, group)


def split_targets(
    name: str | None, target: torch.Tensor, columns: Columns, ignore_index: int
) -> SplitTargets:
    """Converts targets ``[rows]``, indices into the whole vocabulary, for this rank's columns."""
    target = target.long()
    ignored = target == ignore_index
    invalid = ~ignored & ((target < 0) | (target >= columns.vocabulary))
    if name is not None and invalid.device.type == "cpu" and bool(invalid.any()):
        raise ValueError(
            f"{name}: target must be in [0, {columns.vocabulary}) or ignore_index {ignore_index}, "
            f"got {int(target[invalid][0])}"
        )
    local = target - columns.first
    own = (local >= 0) & (local < columns.width) & ~ignored
    return SplitTargets(local.clamp(0, columns.width - 1).unsqueeze(1), own, ignored, invalid)


def split_losses(
    rows: torch.Tensor, targets: SplitTargets, label_smoothing: float, columns: Columns
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes losses of logits ``[rows, width]`` by one all-reduce by maximum and one by sum.

    Returns fp32 ``[rows]`` each: ``losses``, 0 for ignored rows and NaN for invalid targets;
    ``largest``, the largest logit on any rank; ``exp_sum``, the sum of exp(logit - largest) over
    all ranks.
    """
    own_largest, sums = _local_sums(rows, targets, label_smoothing > 0)
    largest = own_largest.clone()
    distributed.all_reduce(largest, op=distributed.ReduceOp.MAX, group=columns.group)
    # A rank whose logits are all -inf adds nothing, and would give exp(-inf + inf).
    nothing = own_largest == -torch.inf
    sums[0] = torch.where(nothing, 0.0, sums[0] * (own_largest - largest).exp())
    distributed.all_reduce(sums, group=columns.group)
    log_sum = sums[0].log() + largest
    losses = (1.0 - label_smoothing) * (log_sum - sums[1])
    if label_smoothing:
        losses += label_smoothing * (log_sum - sums[2] / columns.vocabulary)
    losses = losses.masked_fill_(targets.ignored, 0.0).masked_fill_(targets.invalid, torch.nan)
    return losses, largest, sums[0]


def split_gradient(
    rows: torch.Tensor,
    targets: SplitTargets,
    largest: torch.Tensor,
    exp_sum: torch.Tensor,
    factor: torch.Tensor,
    label_smoothing: float,
    columns: Columns,
    out: torch.Tensor,
    wide_elements: int = 1 << 26,
    entropies: torch.Tensor | None = None,
) -> None:
    """Writes the gradient of this rank's logits ``[rows, width]`` to ``out``, without a collective.

    ``out`` may be ``rows``. ``factor``, fp32 ``[rows]`` or ``[1]``, is the gradient of the losses,
    and ``entropies`` ``[2, rows]`` are those of ``split_entropies`` and their gradients. At most
    ``wide_elements`` logits have an fp32 copy at a time. Losses without a valid target, and
    entropies of ignored rows, have gradient 0.
    """
    without = targets.ignored | targets.invalid
    factor = factor.float().expand(len(rows)).masked_fill(without, 0.0).unsqueeze(1)
    for part in _pieces(rows, wide_elements):
        f, index = factor[part], targets.column[part]
        wide = (rows[part].float() - largest[part].unsqueeze(1)).exp_()
        if entropies is None:
            wide.mul_(f / exp_sum[part].unsqueeze(1))
        else:  # of an entropy: -p (log p + entropy)
            entropy, grad = entropies[:, part].unsqueeze(2)
            terms = torch.special.entr(wide.div_(exp_sum[part].unsqueeze(1)))
            wide.mul_(f - grad * entropy).addcmul_(terms, grad)
        if label_smoothing:
            wide.sub_(f * (label_smoothing / columns.vocabulary))
        hot = torch.where(targets.own[part].unsqueeze(1), f * (1.0 - label_smoothing), 0.0)
        wide.scatter_(1, index, wide.gather(1, index) - hot)
        out[part] = wide.masked_fill_(targets.ignored[part].unsqueeze(1), 0.0)


def split_entropies(
    rows: torch.Tensor, stats: torch.Tensor, columns: Columns, wide_elements: int
) -> torch.Tensor:
    """Returns the entropies of softmax(logits), fp32 ``[rows]``, by one all-reduce if split.

    ``rows`` are this rank's logits ``[rows, width]`` and ``stats`` ``[rows, 2]`` the largest logit
    of each row and the sum of exp(logit - largest) over all ranks.
    """
    found = rows.new_empty(len(rows), dtype=torch.float32)
    for part in _pieces(rows, wide_elements):
        largest, exp_sum = stats[part].split(1, 1)
        # Sums -p log p, which is 0 where p is.
        found[part] = torch.special.entr((rows[part].float() - largest).exp_() / exp_sum).sum(1)
    if columns.group is not None:
        distributed.all_reduce(found, group=columns.group)
    return found


def _pieces(rows: torch.Tensor, elements: int) -> Iterator[slice]:
    """Yields parts of the rows that have at most ``elements`` elements, or are one row."""
    count = max(1, elements // max(1, rows.shape[1]))
    for start in range(0, len(rows), count):
        yield slice(start, start + count)


def _local_sums(
    rows: torch.Tensor, targets: SplitTargets, with_sum: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what the logits ``[rows, width]`` of this rank contribute to the losses, in fp32.

    ``largest`` ``[rows]`` is the largest logit of each row; ``sums`` ``[3, rows]`` are the sum of
    exp(logit - largest), the target's logit or 0, and the sum of the logits or 0.
    """
    stats = rows.new_empty(len(rows), 2, dtype=torch.float32)
    # The op leaves ignored rows out; here the statistics of all rows are wanted, for any target.
    anything = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    cross_entropy_fwd(rows, anything, stats=stats, ignore_index=-1)
    sums = rows.new_zeros(3, len(rows), dtype=torch.float32)
    sums[0] = stats[:, 1]
    sums[1] = torch.where(targets.own, rows.gather(1, targets.column).squeeze(1).float(), 0.0)
    if with_sum:
        sums[2] = rows.sum(1, dtype=torch.float32)
    return stats[:, 0].contiguous(), sums
