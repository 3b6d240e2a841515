"""Batch normalisation over the ranks of a group: one collective forward, one backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import distributed

from apex_te.ops.batch_norm import (
    batch_norm_bwd,
    batch_norm_combine,
    batch_norm_reduce,
    batch_norm_stats,
)


class GroupStatistics(NamedTuple):
    """Statistics of a group's batch, float32 [c], and the elements of a channel on each rank."""

    mean: torch.Tensor
    inv_std: torch.Tensor
    counts: torch.Tensor


class GroupGradients(NamedTuple):
    """Gradients of one rank's data, and its part of those of the parameters."""

    dx: torch.Tensor
    dz: torch.Tensor | None
    dweight: torch.Tensor | None
    dbias: torch.Tensor | None


_neighbours: dict[int, tuple[object, object]] = {}  # by size: the world, this rank's group in it


def split_world(owner: str, size: int) -> distributed.ProcessGroup | None:
    """Makes groups of ``size`` neighbouring ranks and returns this rank's; all ranks call it."""
    world = distributed.get_world_size()
    if size < 1 or world % size:
        raise ValueError(f"{owner} must divide the number of ranks, {world}, got {size}")
    own = distributed.get_rank() // size
    groups = [distributed.new_group(range(i * size, (i + 1) * size)) for i in range(world // size)]
    return groups[own]


def neighbours(owner: str, size: int) -> distributed.ProcessGroup | None:
    """Returns this rank's group of ``size``, made once for each size; None for a rank alone."""
    if size == 1:
        return None
    world = distributed.group.WORLD
    if size not in _neighbours or _neighbours[size][0] is not world:
        _neighbours[size] = world, split_world(owner, size)
    return _neighbours[size][1]  # type: ignore[return-value]


def group_statistics(
    x: torch.Tensor,
    group: distributed.ProcessGroup | None,
    eps: float,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    *,
    channels_last: bool,
) -> GroupStatistics:
    """Computes the statistics of a group's batch, which every rank combines alike."""
    mean, var = batch_norm_stats(x, channels_last=channels_last)
    c = len(mean)
    count = x.numel() // c if c else 0
    counts = torch.full((1,), count, dtype=torch.int32, device=x.device)
    means, variances = mean[None], var[None]
    if group is not None:
        packed = torch.cat((mean, var, counts.view(torch.float32)))
        ranks = distributed.get_world_size(group)
        gathered = packed.new_empty(ranks * len(packed))  # flat, as Gloo requires
        distributed.all_gather_into_tensor(gathered, packed, group=group)
        gathered = gathered.view(ranks, -1)
        means, variances = gathered[:, :c], gathered[:, c : 2 * c]
        counts = gathered[:, 2 * c].contiguous().view(torch.int32)
    stats = batch_norm_combine(
        means, variances, counts, eps, running_mean=running_mean, running_var=running_var,
        momentum=momentum,
    )  # fmt: skip
    return GroupStatistics(stats.mean, stats.inv_std, counts)


def group_gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    stats: GroupStatistics,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    group: distributed.ProcessGroup | None,
    *,
    z: torch.Tensor | None = None,
    relu: bool = False,
    with_dz: bool = False,
    by_batch: bool = True,
    channels_last: bool,
) -> GroupGradients:
    """Computes the gradients through statistics of the group's batch and the ReLU, if any.

    Without ``by_batch`` the statistics are constants.
    """
    mean, inv_std, counts = stats
    sums = batch_norm_reduce(
        dy, x, mean, inv_std, weight, bias, z=z, relu=relu, channels_last=channels_last
    )
    both = torch.stack((sums.sum_dy, sums.sum_dy_xmu))
    if not by_batch:
        both.zero_()
    elif group is not None:
        distributed.all_reduce(both, group=group)
    dx, dz = batch_norm_bwd(
        dy, x, mean, inv_std, weight, both[0], both[1], counts, bias, z=z, relu=relu,
        with_dz=with_dz and relu, channels_last=channels_last,
    )  # fmt: skip
    return GroupGradients(dx, dz if relu or not with_dz else dy, sums.dweight, sums.dbias)
