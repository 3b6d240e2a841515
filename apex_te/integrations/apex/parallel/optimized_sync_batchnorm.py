"""Batch normalisation by the statistics of a group of ranks."""

from __future__ import annotations

import torch
from torch import distributed
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from apex_te.compatibility.apex._batch_norm import split_world

from .optimized_sync_batchnorm_kernel import SyncBatchnormFunction


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation whose statistics are those of the batches of all ranks of a group.

    Ranks may have batches of different sizes. Without torch.distributed, or in a group of one, it
    normalises by the local batch. Tensors in channels_last memory are taken as they lie.

    Args:
        num_features: number of channels.
        eps: added to the variance.
        momentum: share of a new batch in the running statistics; None for their plain average.
        affine: True for weight and bias.
        track_running_stats: True for running statistics, by which evaluation normalises.
        process_group: ranks that share statistics; None for all.
        channel_last: True for data [..., c] instead of [n, c, ...]. Data [n, c] need none.
        fuse_relu: True to apply a ReLU to the result.

    Raises:
        ValueError: an input has less than 2 dimensions, or in training one value per channel on a
            rank alone.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: distributed.ProcessGroup | None = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group = process_group
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def _specify_process_group(self, process_group: distributed.ProcessGroup | None) -> None:
        self.process_group = process_group

    def _specify_channel_last(self, channel_last: bool) -> None:
        self.channel_last = channel_last

    def forward(self, input: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """Normalises ``input``, adds ``z``, of its shape and dtype, and applies the ReLU if any.

        Raises:
            ValueError: ``input`` has fewer than 2 dimensions.
        """
        if input.dim() < 2:
            raise ValueError(
                f"SyncBatchNorm: input must have 2 dimensions or more, got {list(input.shape)}"
            )
        factor = 0.0
        if self.training and self.track_running_stats:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            count = self.num_batches_tracked
            factor = 1.0 / float(count) if self.momentum is None else self.momentum
        updates = self.training and self.track_running_stats
        by_batch = self.training or not self.track_running_stats
        running = (self.running_mean, self.running_var) if updates or not by_batch else (None, None)
        wide = [None if each is None else each.float() for each in running]  # halves at O3
        out: torch.Tensor = SyncBatchnormFunction.apply(
            input, z, self.weight, self.bias, *wide, self.eps, by_batch, factor,
            self.process_group, self.channel_last or input.dim() == 2, self.fuse_relu,
        )  # fmt: skip
        for kept, each in zip(running, wide, strict=True):
            if updates and kept is not None and each is not None and each is not kept:
                kept.copy_(each)
        return out


def convert_syncbn_model(
    module: torch.nn.Module,
    process_group: distributed.ProcessGroup | None = None,
    channel_last: bool = False,
) -> torch.nn.Module:
    """Replaces the batch normalisations in a module by ``SyncBatchNorm``; returns the module.

    The new modules have the parameters and buffers of the old ones. Instance normalisations stay.

    Args:
        module: changed in place, unless it is a batch normalisation itself.
        process_group, channel_last: of the new modules.
    """
    if isinstance(module, _InstanceNorm):
        return module
    made = module
    if isinstance(module, _BatchNorm):
        made = SyncBatchNorm(
            module.num_features, module.eps, module.momentum, module.affine,
            module.track_running_stats, process_group, channel_last,
            getattr(module, "fuse_relu", False),
        )  # fmt: skip
        made.train(module.training)
        for name, value in (*module._parameters.items(), *module._buffers.items()):
            setattr(made, name, value)
    for name, child in module.named_children():
        made.add_module(name, convert_syncbn_model(child, process_group, channel_last))
    return made


def create_syncbn_process_group(group_size: int) -> distributed.ProcessGroup | None:
    """Returns this rank's group of ``group_size`` neighbouring ranks, or None for 0: all ranks.

    All ranks call it.

    Raises:
        ValueError: ``group_size`` does not divide the number of ranks.
    """
    if group_size == 0:
        return None
    return split_world("create_syncbn_process_group: group_size", group_size)
