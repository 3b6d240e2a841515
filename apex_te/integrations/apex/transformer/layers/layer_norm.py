"""Layer norms whose parameters are marked for sequence parallelism, by the op ``layer_norm``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from .....ops.layer_norm import layer_norm

Shape = int | Sequence[int]


class FusedLayerNorm(torch.nn.LayerNorm):
    """Layer norm with the output in the input's dtype.

    Args:
        normalized_shape: sizes of the last dimensions, which are normalized.
        eps: added to the variance.
        elementwise_affine: has a weight and a bias.
        sequence_parallel_enabled: marks both so, for the sum of their gradients over ranks, which
            the training loop does.
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        *,
        sequence_parallel_enabled: bool = False,
    ) -> None:
        shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
        super().__init__(shape, eps, elementwise_affine)
        self.sequence_parallel_enabled = sequence_parallel_enabled
        for param in self.parameters():
            param.sequence_parallel_enabled = sequence_parallel_enabled  # type: ignore[attr-defined]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the normalized input [..., *normalized_shape]."""
        weight, bias = self.weight, self.bias
        if weight is None or len(self.normalized_shape) > 1 or input.dtype is torch.float64:
            return functional.layer_norm(input, self.normalized_shape, weight, bias, self.eps)
        out = layer_norm(input, weight.to(input.dtype), bias.to(input.dtype), self.eps)
        assert isinstance(out, torch.Tensor)  # there is no residual
        return out


class MixedFusedLayerNorm(FusedLayerNorm):
    """Layer norm with the output in the weight's dtype; arguments as ``FusedLayerNorm``'s."""

    def __init__(
        self, normalized_shape: Shape, eps: float = 1e-5, *, sequence_parallel_enabled: bool = False
    ) -> None:
        super().__init__(normalized_shape, eps, sequence_parallel_enabled=sequence_parallel_enabled)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the normalized input [..., *normalized_shape], in the weight's dtype."""
        return super().forward(input.float()).to(self.weight.dtype)


class FastLayerNorm(FusedLayerNorm):
    """Layer norm of one dimension, of any size.

    Args:
        hidden_size: its size.
        eps: added to the variance.
        sequence_parallel_enabled: as in ``FusedLayerNorm``.
    """

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, *, sequence_parallel_enabled: bool = False
    ) -> None:
        super().__init__(hidden_size, eps, sequence_parallel_enabled=sequence_parallel_enabled)
