"""What the quantizers with one scale for the tensor have in common, in plain PyTorch."""

from __future__ import annotations

import torch

# Partial amaxes that a kernel leaves at most (csrc/common/numerics/quantize.h).
MAX_AMAXES = 1024

_FLOAT_MAX = torch.finfo(torch.float32).max


def contiguous_matrix(op: str, x: torch.Tensor) -> torch.Tensor:
    """`x`, contiguous; raises ValueError unless it has two dimensions."""
    if x.dim() != 2:
        raise ValueError(f"{op}: x must have 2 dimensions, got shape {list(x.shape)}")
    return x.contiguous()


def float_scalars(like: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Uninitialised float32 tensors of one element on `like`'s device."""
    return [like.new_empty(1, dtype=torch.float32) for _ in range(count)]


def outputs(
    op: str,
    x: torch.Tensor,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    out_rowwise: torch.Tensor | None,
    out_columnwise: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The given outputs, or fresh ones of those that were asked for."""
    if rowwise and out_rowwise is None:
        out_rowwise = torch.empty_like(x, dtype=dtype)
    if columnwise and out_columnwise is None:
        out_columnwise = x.new_empty(x.shape[::-1], dtype=dtype)
    if out_rowwise is None and out_columnwise is None:
        raise ValueError(f"{op}: rowwise or columnwise must be True, got False for both")
    return out_rowwise, out_columnwise


def reference_amax(x: torch.Tensor) -> torch.Tensor:
    """max |x| as one float32 element, NaN above infinity; 0 for an empty x."""
    bits = x.float().abs().reshape(-1).view(torch.int32)
    found = bits.max() if bits.numel() else torch.zeros((), dtype=torch.int32, device=x.device)
    return found.reshape(1).view(torch.float32)


def reference_scale(amax: torch.Tensor, target: float, eps: float, pow2: bool) -> torch.Tensor:
    """target / amax in float32; the rule of csrc/common/numerics/scaling.h."""
    amax = torch.where(amax < eps, torch.full_like(amax, eps), amax)
    scale = (torch.full_like(amax, target) / amax).clamp(max=_FLOAT_MAX)
    if pow2:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    usable = torch.isfinite(amax) & (amax != 0)
    return torch.where(usable, scale, torch.ones_like(scale))


def reference_inverse(amax: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """1 / scale, infinite where amax is; the rule of csrc/common/numerics/scaling.h."""
    return torch.where(torch.isinf(amax), torch.inf, 1.0 / scale)
