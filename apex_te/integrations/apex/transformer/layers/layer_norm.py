"""apex's layer norms with their parameters marked for sequence parallelism.

The training loop sums the gradients of parameters with ``sequence_parallel_enabled`` over ranks.
"""

from __future__ import annotations

from typing import Any

import torch

from ...contrib.layer_norm import layer_norm as contrib
from ...normalization import fused_layer_norm as normalization
from ...normalization.fused_layer_norm import Shape


def _mark(module: torch.nn.Module, sequence_parallel_enabled: bool) -> None:
    """Marks a norm and its parameters."""
    marked: list[Any] = [module, *module.parameters()]
    for each in marked:
        each.sequence_parallel_enabled = sequence_parallel_enabled


class FusedLayerNorm(normalization.FusedLayerNorm):
    """Layer norm with the output in the input's dtype.

    Args:
        normalized_shape: shape of the normalised trailing dimensions, or the last one's size.
        eps: added to the variance.
        elementwise_affine: False has no weight and bias.
        sequence_parallel_enabled: marks both.
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        *,
        sequence_parallel_enabled: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)
        _mark(self, sequence_parallel_enabled)


class MixedFusedLayerNorm(normalization.MixedFusedLayerNorm):
    """Layer norm with the output in the weight's dtype; ``elementwise_affine`` must be True.

    Args:
        normalized_shape: shape of the normalised trailing dimensions, or the last one's size.
        eps: added to the variance.
        sequence_parallel_enabled: marks weight and bias.
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        *,
        sequence_parallel_enabled: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(normalized_shape, eps, **kwargs)
        _mark(self, sequence_parallel_enabled)


class FastLayerNorm(contrib.FastLayerNorm):
    """Layer norm of a hidden size.

    Args:
        hidden_size: size of the last dimension; any size.
        eps: added to the variance.
        sequence_parallel_enabled: marks weight and bias.
    """

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, *, sequence_parallel_enabled: bool = False
    ) -> None:
        super().__init__(hidden_size, eps)
        _mark(self, sequence_parallel_enabled)
