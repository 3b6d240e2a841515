"""Norms of query and key heads, for ``qk_norm_type`` of ``MultiheadAttention``."""

from __future__ import annotations

from typing import Any

import torch

from ...ops.rms_norm import rms_norm
from ...runtime.named_arguments import did_you_mean
from .._core.arguments import checked_eps
from .._core.parallel import tag


class _L2Normalization(torch.nn.Module):
    """L2 normalisation ``x / sqrt(sum(x ** 2) + eps)`` over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps / size
        self.factor = size**-0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, None, self.eps) * self.factor


def qk_norms(
    owner: str,
    kind: str | None,
    size: int,
    eps: float,
    params_dtype: torch.dtype | None,
    device: torch.device | str | int | None,
    split: bool,
    norms: dict[str, type[Any]],
) -> tuple[torch.nn.Module | None, torch.nn.Module | None]:
    """Makes the norms of query and key heads; L2 normalisation is one module for both."""
    eps = checked_eps(owner, "qk_norm_eps", eps)
    if kind is None:
        return None, None
    if kind == "L2Normalization":
        shared = _L2Normalization(size, eps)
        return shared, shared
    if kind not in tuple(norms):
        raise ValueError(
            f"{owner}: qk_norm_type must be None, 'RMSNorm', 'LayerNorm' or 'L2Normalization', "
            f"got {kind!r}{did_you_mean(kind, (*norms, 'L2Normalization'))}"
        )
    pair = tuple(norms[kind](size, eps, params_dtype=params_dtype, device=device) for _ in range(2))
    if split:
        for norm in pair:
            for parameter in norm.parameters():
                tag(parameter, None, True)
    return pair[0], pair[1]
