"""apex's syncbn: batch normalisation in the steps between which ranks exchange statistics.

Data are [n, c, ...], those of functions named ``_c_last`` [..., c]. Statistics are float32 [c];
weight and shift have the data's dtype or float32, and may be None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from apex_te._version import __version__ as __version__
from apex_te.ops.batch_norm import (
    batch_norm_bwd,
    batch_norm_combine,
    batch_norm_fwd,
    batch_norm_reduce,
    batch_norm_relu_bwd,
    batch_norm_stats,
)

__all__ = [
    "batchnorm_backward",
    "batchnorm_backward_c_last",
    "batchnorm_forward",
    "batchnorm_forward_c_last",
    "reduce_bn",
    "reduce_bn_c_last",
    "relu_bw_c_last",
    "welford_mean_var",
    "welford_mean_var_c_last",
    "welford_parallel",
]

Optional = torch.Tensor | None
_F = TypeVar("_F", bound=Callable[..., Any])


@torch.no_grad()
def welford_mean_var(input: torch.Tensor) -> list[torch.Tensor]:
    """Returns [mean, biased variance] of each channel."""
    return list(batch_norm_stats(input))


@torch.no_grad()
def welford_mean_var_c_last(input: torch.Tensor) -> list[torch.Tensor]:
    """Returns [mean, biased variance] of each channel."""
    return list(batch_norm_stats(input, channels_last=True))


@torch.no_grad()
def welford_parallel(
    mean_feature_nodes: torch.Tensor, var_biased: torch.Tensor, numel: torch.Tensor, eps: float
) -> list[torch.Tensor]:
    """Returns [mean, unbiased variance, 1 / sqrt(biased variance + eps)] of all ranks together.

    Args:
        mean_feature_nodes, var_biased: of each rank, float32 [ranks, c].
        numel: elements of a channel on each rank, int32 [ranks].
        eps: added to the variance.
    """
    return list(batch_norm_combine(mean_feature_nodes, var_biased, numel, float(eps)))


@torch.no_grad()
def batchnorm_forward(
    input: torch.Tensor,
    mean: torch.Tensor,
    inv_std: torch.Tensor,
    weight: Optional,
    shift: Optional,
) -> torch.Tensor:
    """Returns ``(input - mean) * inv_std * weight + shift``."""
    return batch_norm_fwd(input, mean, inv_std, weight, shift)


@torch.no_grad()
def batchnorm_forward_c_last(
    input: torch.Tensor,
    z: Optional,
    mean: torch.Tensor,
    inv_std: torch.Tensor,
    weight: Optional,
    shift: Optional,
    fuse_relu: bool,
) -> torch.Tensor:
    """Returns ``(input - mean) * inv_std * weight + shift + z``, or its ReLU."""
    return batch_norm_fwd(
        input, mean, inv_std, weight, shift, z=z, relu=bool(fuse_relu), channels_last=True
    )


def _reduce_bn(channels_last: bool) -> Callable[..., list[torch.Tensor]]:
    """Returns ``reduce_bn`` for one layout of the data."""

    @torch.no_grad()
    def reduce_bn(
        grad_output: torch.Tensor,
        input: torch.Tensor,
        mean: torch.Tensor,
        inv_std: torch.Tensor,
        weight: Optional,
    ) -> list[torch.Tensor]:
        """Returns [sum_dy, sum_dy_xmu, grad_weight, grad_bias], the last two [0] without weight.

        ``sum_dy_xmu`` is the sum of ``grad_output * (input - mean)`` over each channel.
        """
        sums = batch_norm_reduce(
            grad_output, input, mean, inv_std, weight, weight, channels_last=channels_last
        )
        none = input.new_empty(0)
        return [none if t is None else t for t in sums]

    return _named(reduce_bn, channels_last)


def _backward(channels_last: bool) -> Callable[..., torch.Tensor]:
    """Returns ``batchnorm_backward`` for one layout of the data."""

    @torch.no_grad()
    def batchnorm_backward(
        grad_output: torch.Tensor,
        input: torch.Tensor,
        mean: torch.Tensor,
        inv_std: torch.Tensor,
        weight: Optional,
        sum_dy: torch.Tensor,
        sum_dy_xmu: torch.Tensor,
        count: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the gradient of the input.

        Args:
            grad_output, input, mean, inv_std, weight: as in ``reduce_bn``.
            sum_dy, sum_dy_xmu: results of ``reduce_bn``, added over all ranks.
            count: elements of a channel on each rank, int32 [ranks].
        """
        return batch_norm_bwd(
            grad_output, input, mean, inv_std, weight, sum_dy, sum_dy_xmu, count,
            channels_last=channels_last,
        )[0]  # fmt: skip

    return _named(batchnorm_backward, channels_last)


def _named(function: _F, channels_last: bool) -> _F:
    """Returns a function under its name for the layout."""
    name = function.__name__ + "_c_last" * channels_last
    function.__name__ = function.__qualname__ = name
    return function


reduce_bn, reduce_bn_c_last = map(_reduce_bn, (False, True))
batchnorm_backward, batchnorm_backward_c_last = map(_backward, (False, True))


@torch.no_grad()
def relu_bw_c_last(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    z: Optional,
    mean: torch.Tensor,
    inv_std: torch.Tensor,
    weight: Optional,
    shift: Optional,
) -> torch.Tensor:
    """Returns the gradient where the argument of the ReLU is positive, else 0."""
    return batch_norm_relu_bwd(
        grad_output, input, mean, inv_std, weight, shift, z=z, channels_last=True
    )
