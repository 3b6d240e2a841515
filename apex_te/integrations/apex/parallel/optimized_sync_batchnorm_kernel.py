"""The autograd function of batch normalisation over a group of ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from torch.autograd.function import once_differentiable

from apex_te.compatibility.apex._batch_norm import (
    GroupStatistics,
    group_forward,
    group_gradients,
)
from apex_te.ops.batch_norm import batch_norm_fwd


class SyncBatchnormFunction(torch.autograd.Function):
    """Batch normalisation with a residual and a ReLU, by the statistics of a group's batch."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        z: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_variance: torch.Tensor | None,
        eps: float,
        track_running_stats: bool = False,
        momentum: float = 1.0,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> torch.Tensor:
        """Normalises ``input``; with ``track_running_stats`` by its batch, else by running ones."""
        group = _exchange_group(process_group) if track_running_stats else None
        if track_running_stats:
            c = input.shape[-1 if channel_last else 1]
            if group is None and input.numel() == c:
                raise ValueError(
                    "SyncBatchNorm: input must have more than 1 value per channel when training, "
                    f"got {list(input.shape)}"
                )
            y, stats = group_forward(
                input, weight, bias, group, eps, running_mean, running_variance, momentum, z=z,
                relu=fuse_relu, channels_last=channel_last,
            )  # fmt: skip
        else:
            assert running_mean is not None
            assert running_variance is not None
            inv_std = (running_variance.float() + eps).rsqrt()
            no_counts = torch.zeros(1, dtype=torch.int32, device=input.device)
            stats = GroupStatistics(running_mean.float(), inv_std, no_counts)
            y = batch_norm_fwd(
                input, stats.mean, stats.inv_std, weight, bias, z=z, relu=fuse_relu,
                channels_last=channel_last,
            )  # fmt: skip
        ctx.save_for_backward(input, z if fuse_relu else None, weight, bias, *stats)
        ctx.options = group, track_running_stats, channel_last, fuse_relu
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        """Computes the gradients; those of weight and bias are this rank's part."""
        input, z, weight, bias, *stats = ctx.saved_tensors
        group, by_batch, channel_last, fuse_relu = ctx.options
        grads = group_gradients(
            grad_output, input, GroupStatistics(*stats), weight, bias, group, z=z, relu=fuse_relu,
            with_dz=ctx.needs_input_grad[1], by_batch=by_batch, channels_last=channel_last,
        )  # fmt: skip
        return (grads.dx, grads.dz, grads.dweight, grads.dbias, *[None] * 8)


def _exchange_group(group: Any) -> distributed.ProcessGroup | None:
    """Returns the group over which statistics are exchanged, or None if there is only one rank."""
    is_alone = group is distributed.GroupMember.NON_GROUP_MEMBER
    if is_alone or not (distributed.is_available() and distributed.is_initialized()):
        return None
    group = distributed.group.WORLD if group is None else group
    return None if distributed.get_world_size(group) == 1 else group
