"""Products of groups of rows whose sizes only the device knows; nothing waits for the device.

torch's grouped products read the groups' ends on the device where there is a kernel for it:
bfloat16 on sm_90 and sm_100, E4M3 with float32 scales of rows on sm_90. Elsewhere every group is
multiplied with all rows and a mask keeps its own: right, and as many times slower as there are
groups.
"""

from __future__ import annotations

from typing import Any

import torch

from ..gpu_arch import nvidia_capability
from . import product_count
from .grouped_quantize import Groups, decode, scale_rows

__all__ = [
    "contract_groups",
    "has_grouped_fp8",
    "has_grouped_products",
    "multiplies_codes",
    "multiply_groups",
    "scaled_contract_groups",
    "scaled_multiply_groups",
]

_GROUPED = ((9, 0), (10, 0))
_GROUPED_FP8 = ((9, 0),)


def has_grouped_products(device: torch.device) -> bool:
    """Whether torch multiplies groups of bfloat16 rows by their ends on the device."""
    return hasattr(torch, "_grouped_mm") and nvidia_capability(device) in _GROUPED


def has_grouped_fp8(device: torch.device) -> bool:
    """The same for E4M3 codes."""
    public = hasattr(torch.nn.functional, "scaled_grouped_mm")
    return public and nvidia_capability(device) in _GROUPED_FP8


def multiply_groups(a: torch.Tensor, b: torch.Tensor, groups: Groups) -> torch.Tensor:
    """``out[r] = b[g] @ a[r]`` of each row r and its group g; rows of no group have no values.

    Args:
        a: [rows, K].
        b: [groups, N, K] of its dtype.

    Returns:
        [rows, N] in the dtype of `a`.
    """
    if _has_kernel(a, b):
        return torch._grouped_mm(a, b.transpose(-2, -1), offs=groups.ends)
    group = _group_of_rows(groups.ends, a.shape[0])
    out = a.new_zeros((a.shape[0], b.shape[1]))
    for g in range(groups.num_groups):
        out = torch.where((group == g)[:, None], torch.mm(a, b[g].t()), out)
    return out


def contract_groups(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """``out[g] = a[:, of g] @ b[of g]``, the groups lying along the inner dimension.

    Args:
        a: [M, K]; b: [K, N] of its dtype.
        ends: int32 [groups], the place after each group's last in K.

    Returns:
        [groups, M, N] in their dtype; without values for a group of size 0.
    """
    if _has_kernel(a, b):
        return torch._grouped_mm(a, b, offs=ends)
    group = _group_of_rows(ends, a.shape[1])
    zero = a.new_zeros(())
    parts = []
    for g in range(ends.numel()):
        own = group == g  # masked, not multiplied by 0: there may be NaN in what is not its own
        parts.append(torch.mm(torch.where(own, a, zero), torch.where(own[:, None], b, zero)))
    return torch.stack(parts)


def _has_kernel(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether torch's product takes these; its rows have to begin at multiples of 16 bytes."""
    if a.dtype is not torch.bfloat16 or not has_grouped_products(a.device):
        return False
    fixed = (a.shape[0], b.shape[1]) if b.dim() == 2 else b.shape[1:]
    return fixed[0] % 8 == 0 and fixed[1] % 8 == 0


def _group_of_rows(ends: torch.Tensor, rows: int) -> torch.Tensor:
    """The group of each of `rows` rows; the number of groups for those behind the last."""
    at = torch.arange(rows, dtype=torch.int32, device=ends.device)
    return torch.searchsorted(ends, at, right=True, out_int32=True)


def scaled_multiply_groups(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    groups: Groups,
    fast: bool,
) -> torch.Tensor:
    """`multiply_groups` of FP8 codes, times the inverses of their scales; bfloat16 [rows, N].

    Args:
        a: [rows, K] FP8; a_scale_inv: float32 [rows].
        b: [groups, N, K] FP8; b_scale_inv: float32 [groups].
        fast: fast accumulation, where the product is of codes.
    """
    product_count.add()
    if multiplies_codes(a, b):
        scale = b_scale_inv[:, None].expand(-1, b.shape[1]).contiguous()
        return _scaled(a, b.transpose(-2, -1), a_scale_inv, scale, groups.ends, fast)
    out = multiply_groups(decode(a), decode(b), groups)
    group = _group_of_rows(groups.ends, a.shape[0]).clamp_(max=groups.num_groups - 1)
    # One factor: two would round the result twice more.
    scale_rows(out, a_scale_inv * b_scale_inv[group])
    return out


def scaled_contract_groups(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    ends: torch.Tensor,
    fast: bool,
) -> torch.Tensor:
    """`contract_groups` of FP8 codes, times the inverses of their scales; bfloat16 [groups, M, N].

    Args:
        a: [M, K] FP8; b: [N, K] FP8; groups begin at multiples of 16 in K and are none empty.
        a_scale_inv, b_scale_inv: float32 [groups].
        fast: as in `scaled_multiply_groups`.
    """
    product_count.add()
    if multiplies_codes(a, b):
        of_a = a_scale_inv[:, None].expand(-1, a.shape[0]).reshape(-1)
        of_b = b_scale_inv[:, None].expand(-1, b.shape[0]).reshape(-1)
        return _scaled(a, b.t(), of_a, of_b, ends, fast)
    out = contract_groups(decode(a), decode(b).t(), ends)
    # As many rows as keep a GPU busy.
    factor = (a_scale_inv * b_scale_inv)[:, None].expand(-1, a.shape[0]).reshape(-1)
    scale_rows(out.flatten(0, 1), factor)
    return out


def multiplies_codes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether FP8 codes of these dtypes are multiplied as they are; else they are decoded."""
    e4m3 = a.dtype is torch.float8_e4m3fn and b.dtype is torch.float8_e4m3fn
    return e4m3 and has_grouped_fp8(a.device)


def _scaled(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    ends: torch.Tensor,
    fast: bool,
) -> torch.Tensor:
    functional: Any = torch.nn.functional
    rows = functional.ScalingType.RowWise
    return functional.scaled_grouped_mm(
        a, b, a_scale_inv, rows, b_scale_inv, rows, offs=ends, output_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )  # fmt: skip
