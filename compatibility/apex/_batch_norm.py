"""Batch normalisation over the ranks of a group: one collective forward, one backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import distributed

from apex_te.ops.batch_norm import (
    BatchNormGradients,
    batch_norm_bwd,
    batch_norm_combine,
    batch_norm_fwd,
    batch_norm_reduce,
    batch_norm_stats,
    batch_norm_train_bwd,
    batch_norm_train_fwd,
)


class GroupStatistics(NamedTuple):
    """Statistics of a group's batch, float32 [c], and the elements of a channel on each rank.

    ``counts``, int32 [ranks], is None for a rank alone.
    """

    mean: torch.Tensor
    inv_std: torch.Tensor
    counts: torch.Tensor | None


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


def group_forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    group: distributed.ProcessGroup | None,
    eps: float,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    *,
    z: torch.Tensor | None = None,
    relu: bool = False,
    channels_last: bool,
) -> tuple[torch.Tensor, GroupStatistics]:
    """Normalises by the statistics of a group's batch, which every rank combines alike."""
    if group is None:
        y, mean, inv_std = batch_norm_train_fwd(
            x, weight, bias, eps, z=z, relu=relu, running_mean=running_mean,
            running_var=running_var, momentum=momentum, channels_last=channels_last,
        )  # fmt: skip
        return y, GroupStatistics(mean, inv_std, None)
    mean, var = batch_norm_stats(x, channels_last=channels_last)
    c = len(mean)
    count = x.numel() // c if c else 0
    counts = torch.full((1,), count, dtype=torch.int32, device=x.device)
    packed = torch.cat((mean, var, counts.view(torch.float32)))
    ranks = distributed.get_world_size(group)
    gathered = packed.new_empty(ranks * len(packed))  # flat, as Gloo requires
    distributed.all_gather_into_tensor(gathered, packed, group=group)
    gathered = gathered.view(ranks, -1)
    counts = gathered[:, 2 * c].contiguous().view(torch.int32)
    whole = batch_norm_combine(
        gathered[:, :c], gathered[:, c : 2 * c], counts, eps, running_mean=running_mean,
        running_var=running_var, momentum=momentum,
    )  # fmt: skip
    y = batch_norm_fwd(
        x, whole.mean, whole.inv_std, weight, bias, z=z, relu=relu, channels_last=channels_last
    )
    return y, GroupStatistics(whole.mean, whole.inv_std, counts)


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
) -> BatchNormGradients:
    """Computes the gradients through statistics of the group's batch and the ReLU, if any.

    Those of the parameters are this rank's part. Without ``by_batch`` the statistics are constants.
    """
    mean, inv_std, counts = stats
    data = dy, x, mean, inv_std, weight
    options: dict[str, Any] = {"z": z, "relu": relu, "channels_last": channels_last}
    with_residual = options | {"with_dz": with_dz and relu}
    if group is None and by_batch:
        grads = batch_norm_train_bwd(*data, bias, **with_residual)
    else:
        sums = batch_norm_reduce(*data, bias, **options)
        both = torch.stack((sums.sum_dy, sums.sum_dy_xmu))
        if not by_batch:
            both.zero_()
        else:
            distributed.all_reduce(both, group=group)
        assert counts is not None
        of_data = batch_norm_bwd(*data, both[0], both[1], counts, bias, **with_residual)
        grads = BatchNormGradients(*of_data, sums.dweight, sums.dbias)
    return grads if relu or not with_dz else grads._replace(dz=dy)
