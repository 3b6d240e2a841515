"""Batch normalisation over groups of neighbouring ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from apex_te.compatibility.apex._batch_norm import neighbours

from ...parallel.optimized_sync_batchnorm import SyncBatchNorm


class GroupBatchNorm2d(SyncBatchNorm):
    """Batch normalisation of [n, c, h, w] with the statistics of a group of neighbouring ranks.

    Args:
        num_features: number of channels.
        group_size: number of ranks that share statistics. If it is above 1, all ranks must
            construct the module.
        eps, momentum, affine, track_running_stats: as in ``torch.nn.BatchNorm2d``.

    Raises:
        ValueError: ``group_size`` does not divide the number of ranks, or an input does not have 4
            dimensions.
    """

    def __init__(
        self,
        num_features: int,
        group_size: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        group = neighbours("GroupBatchNorm2d: group_size", group_size)
        alone: Any = distributed.GroupMember.NON_GROUP_MEMBER
        super().__init__(num_features, eps, momentum, affine, track_running_stats, group or alone)
        self.group_size = group_size

    def forward(self, input: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """Normalises ``input`` (in autocast's dtype, if enabled) and adds ``z``.

        Args:
            input: [batch, channels, height, width]; made channels-last if it is not.
            z: tensor of the shape and dtype of the result, or None.

        Raises:
            ValueError: ``input`` does not have 4 dimensions.
        """
        if input.dim() != 4:
            raise ValueError(
                f"GroupBatchNorm2d: input must have 4 dimensions, got {list(input.shape)}"
            )
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        return super().forward(input.contiguous(memory_format=torch.channels_last), z)
