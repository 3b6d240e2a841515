"""``L2Normalization`` over the last dimension, as a module."""

from __future__ import annotations

import torch

from ......ops.rms_norm import rms_norm
from ...._names import named

__all__ = ["L2Normalization"]


@named("transformer_engine.pytorch.ops.basic.l2normalization")
class L2Normalization(torch.nn.Module):
    """``x / sqrt(sum(x ** 2) + eps)`` over the last dimension, for all dtypes of norms."""

    def __init__(
        self,
        *,
        eps: float = 1e-6,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the normalised input, in its shape and dtype."""
        size = input.shape[-1]
        return rms_norm(input, None, self.eps / size) * size**-0.5
