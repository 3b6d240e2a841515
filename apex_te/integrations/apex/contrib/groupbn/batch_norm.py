"""Batch normalisation of channels-last images by the statistics of neighbouring ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from apex_te.compatibility.apex._batch_norm import neighbours

from ...parallel.optimized_sync_batchnorm import SyncBatchNorm


class BatchNorm2d_NHWC(SyncBatchNorm):
    """Batch normalisation of [n, h, w, c] with the statistics of a group of neighbouring ranks.

    Args:
        num_features: number of channels.
        fuse_relu: apply a ReLU to the result.
        bn_group: number of ranks that share statistics. If it is above 1, all ranks must construct
            the module.
        torch_channels_last: inputs are [n, c, h, w] in channels_last memory.
        max_cta_per_sm, cta_launch_margin, multi_stream: ignored.

    Raises:
        ValueError: ``bn_group`` does not divide the number of ranks, an input does not have 4
            dimensions, or a residual is given without ``fuse_relu``.
    """

    def __init__(
        self,
        num_features: int,
        fuse_relu: bool = False,
        bn_group: int = 1,
        torch_channels_last: bool = False,
        max_cta_per_sm: int = 2,
        cta_launch_margin: int = 12,
        multi_stream: bool = False,
    ) -> None:
        alone: Any = distributed.GroupMember.NON_GROUP_MEMBER
        group = neighbours("BatchNorm2d_NHWC: bn_group", bn_group)
        super().__init__(
            num_features, process_group=group or alone,
            channel_last=not torch_channels_last, fuse_relu=fuse_relu,
        )  # fmt: skip
        self.bn_group = bn_group
        self.torch_channels_last = torch_channels_last

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """Normalises ``x``, adds ``z``, in its shape and dtype, and applies the ReLU, if any.

        Raises:
            ValueError: ``x`` does not have 4 dimensions, or ``z`` is given without ``fuse_relu``.
        """
        if x.dim() != 4:
            raise ValueError(f"BatchNorm2d_NHWC: x must have 4 dimensions, got {list(x.shape)}")
        if z is not None and not self.fuse_relu:
            raise ValueError("BatchNorm2d_NHWC: z must be None without fuse_relu, got a tensor")
        if self.torch_channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        return super().forward(x, z)
