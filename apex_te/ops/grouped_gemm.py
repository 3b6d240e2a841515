"""Products of groups of rows whose sizes only the device knows; nothing waits for the device.

FP8 data is multiplied by kernels of our own on sm_90, E4M3 and E5M2 in any pair; bfloat16 by
torch's grouped product on sm_90 and sm_100, for which FP8 data is decoded elsewhere. Without either
every group is multiplied with all rows and a mask keeps its own: right, and as many times
slower as there are groups.
"""

from __future__ import annotations

import torch

from ..runtime.gpu_arch import nvidia_capability
from . import product_count
from .argument_errors import check_dense, checked
from .grouped_quantize import ALIGN, Groups, check_rows, decode, scale_rows
from .registration import bind

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
_GROUPED_FP8 = (9, 0)
_SHORT = (torch.float16, torch.bfloat16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_multiply = bind("grouped_gemm", "grouped_gemm_multiply")
_contract = bind("grouped_gemm", "grouped_gemm_contract")


def has_grouped_products(device: torch.device) -> bool:
    """Returns True if torch multiplies groups of bfloat16 rows by their ends on the device."""
    return hasattr(torch, "_grouped_mm") and nvidia_capability(device) in _GROUPED


def has_grouped_fp8(device: torch.device) -> bool:
    """Returns True if a kernel multiplies FP8 data of groups by their ends on the device."""
    return nvidia_capability(device) == _GROUPED_FP8


@checked
def multiply_groups(a: torch.Tensor, b: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Computes ``out[r] = b[g] @ a[r]`` of each row r and its group g, and nothing for other rows.

    Args:
        a: [rows, K].
        b: [groups, N, K] of its dtype.
        groups: of as many rows.

    Returns:
        [rows, N] in the dtype of ``a``.

    Raises:
        ValueError: a shape that does not match, groups of another matrix among them.
    """
    check_dense("multiply_groups", a=a, b=b, groups=groups.table)
    _check_operands("multiply_groups", a, b, groups)
    if _has_kernel(a, b):
        return torch._grouped_mm(a, b.transpose(-2, -1), offs=groups.ends)
    group = _group_of_rows(groups.ends, a.shape[0])
    zero = a.new_zeros(())
    out = a.new_zeros((a.shape[0], b.shape[1]))
    for g in range(groups.num_groups):
        own = (group == g)[:, None]
        # Of other rows zeros: NaN in one can reach the row before it in a product on the CPU.
        out = torch.where(own, torch.mm(torch.where(own, a, zero), b[g].t()), out)
    return out


@checked
def contract_groups(
    a: torch.Tensor,
    b: torch.Tensor,
    groups: Groups,
    wide: bool = False,
) -> torch.Tensor:
    """Computes ``out[g] = a[:, of g] @ b[of g]`` of groups that lie along the inner dimension.

    Args:
        a: [M, rows]; b: [rows, N] of its dtype.
        groups: of as many rows.
        wide: give the float32 sums of 16-bit operands. torch's grouped product has none: what it
            multiplies stays in bfloat16.

    Returns:
        [groups, M, N] in the dtype of the operands, or float32; without values for a group of size
        0.

    Raises:
        ValueError: a shape that does not match, groups of another matrix among them.
    """
    check_dense("contract_groups", a=a, b=b, groups=groups.table)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(
            "contract_groups: a and b must be [M, rows] and [rows, N], "
            f"got {list(a.shape)} and {list(b.shape)}"
        )
    check_rows("contract_groups", b.shape[0], groups)
    return _contract_values(a, b, groups.ends, wide)


def _contract_values(
    a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor, wide: bool
) -> torch.Tensor:
    """Computes ``contract_groups`` from the end of each group in the inner dimension."""
    if _has_kernel(a, b):
        return torch._grouped_mm(a, b, offs=ends)
    group = _group_of_rows(ends, a.shape[1])
    zero = a.new_zeros(())
    parts = []
    for g in range(ends.numel()):
        own = group == g  # masked, not multiplied by 0: there may be NaN in what is not its own
        x, y = torch.where(own, a, zero), torch.where(own[:, None], b, zero)
        if not wide or a.dtype not in _SHORT:
            parts.append(torch.mm(x, y))
        elif a.is_cuda:
            parts.append(torch.mm(x, y, out_dtype=torch.float32))
        else:
            parts.append(torch.mm(x.float(), y.float()))
    return torch.stack(parts)


def _check_operands(name: str, a: torch.Tensor, b: torch.Tensor, groups: Groups) -> None:
    if a.dim() != 2 or b.dim() != 3 or b.shape[0] != groups.num_groups or b.shape[2] != a.shape[1]:
        raise ValueError(
            f"{name}: a and b must be [rows, K] and [{groups.num_groups}, N, K], "
            f"got {list(a.shape)} and {list(b.shape)}"
        )
    check_rows(name, a.shape[0], groups)


def _has_kernel(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns True if torch's product takes the operands: rows begin at multiples of 16 bytes."""
    if a.dtype is not torch.bfloat16 or not has_grouped_products(a.device):
        return False
    fixed = (a.shape[0], b.shape[1]) if b.dim() == 2 else b.shape[1:]
    return fixed[0] % 8 == 0 and fixed[1] % 8 == 0


def _group_of_rows(ends: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns the group of each of ``rows`` rows, which is ``num_groups`` behind the last."""
    at = torch.arange(rows, dtype=torch.int32, device=ends.device)
    return torch.searchsorted(ends, at, right=True, out_int32=True)


@checked
def scaled_multiply_groups(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    groups: Groups,
    fast: bool,
) -> torch.Tensor:
    """Computes ``multiply_groups`` of FP8 data, times each scale_inv; bfloat16 [rows, N].

    Args:
        a: [rows, K] FP8; a_scale_inv: float32 [rows].
        b: [groups, N, K] FP8; b_scale_inv: float32 [groups].
        fast: sums all in the matrix units, which keep fewer bits than float32; else sums of 128
            products are added up in float32. Where FP8 data is decoded it makes no difference.
    """
    check_dense(
        "scaled_multiply_groups", a=a, b=b, a_scale_inv=a_scale_inv, b_scale_inv=b_scale_inv,
        groups=groups.table,
    )  # fmt: skip
    _check_operands("scaled_multiply_groups", a, b, groups)
    product_count.add()
    if multiplies_codes(a, b):
        out = torch.empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16, device=a.device)
        _multiply(a, a_scale_inv, b, b_scale_inv, groups.ends, out, not fast)
        return out
    out = multiply_groups(decode(a), decode(b), groups)
    group = _group_of_rows(groups.ends, a.shape[0]).clamp_(max=groups.num_groups - 1)
    # One factor: two would round the result twice more.
    scale_rows(out, a_scale_inv * b_scale_inv[group])
    return out


@checked
def scaled_contract_groups(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    ends: torch.Tensor,
    fast: bool,
    wide: bool = False,
) -> torch.Tensor:
    """Computes ``contract_groups`` of FP8 data, times each scale_inv; [groups, M, N].

    Args:
        a: [M, K] FP8; b: [N, K] FP8; groups begin at multiples of 16 in K and are none empty.
        a_scale_inv, b_scale_inv: float32 [groups].
        ends: int32 [groups], the place after each group's last in K.
        fast: as in ``scaled_multiply_groups``.
        wide: give float32 sums, else these rounded to bfloat16. Where FP8 data is decoded, as in
            ``contract_groups``.
    """
    check_dense(
        "scaled_contract_groups", a=a, b=b, a_scale_inv=a_scale_inv, b_scale_inv=b_scale_inv,
        ends=ends,
    )  # fmt: skip
    if ends.dtype is not torch.int32 or ends.dim() != 1:
        actual = f"{ends.dtype} {list(ends.shape)}".removeprefix("torch.")
        raise TypeError(f"scaled_contract_groups: ends must be int32 [groups], got {actual}")
    product_count.add()
    if multiplies_codes(a, b):
        shape = (ends.numel(), a.shape[0], b.shape[0])
        dtype = torch.float32 if wide else torch.bfloat16
        out = torch.empty(shape, dtype=dtype, device=a.device)
        _contract(a, a_scale_inv, b, b_scale_inv, ends, out, not fast)
        return out
    # torch's kernels trust the ends.
    out = _contract_values(decode(a), decode(b).t(), ends.clamp(0, a.shape[1]), wide)
    # As many rows as keep a GPU busy.
    factor = (a_scale_inv * b_scale_inv)[:, None].expand(-1, a.shape[0]).contiguous().view(-1)
    scale_rows(out.flatten(0, 1), factor)
    return out


def multiplies_codes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns True if a kernel multiplies the FP8 data; else it is decoded.

    Their rows have to begin at multiples of 16 bytes, those of the result, too.
    """
    if a.dtype not in _FP8 or b.dtype not in _FP8 or not has_grouped_fp8(a.device):
        return False
    begins = a.storage_offset() % 16 == 0 and b.storage_offset() % 16 == 0
    return begins and a.shape[-1] % ALIGN == 0 and b.shape[-2] % 8 == 0
