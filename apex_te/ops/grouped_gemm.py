"""GEMMs of groups of rows, such as an expert's tokens, whose sizes are on the device.

The host never waits for the sizes. There are three ways to multiply:

- on sm_90 kernels of the suite multiply FP8 data, E4M3 and E5M2 in any pair;
- on sm_90 and sm_100 ``torch._grouped_mm`` multiplies bfloat16; FP8 data that the kernels do not
  take is decoded to bfloat16 first;
- elsewhere every group is multiplied with all rows, and those of other groups are masked. The
  result is the same, but the work grows with the number of groups.

``grouped_quantize.Groups`` holds the places of the groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import runtime
from ..runtime.device import nvidia_capability
from ..runtime.tracing import is_traced
from . import gemm_common
from .binding import Launch, bind, check_dense, checked, note_written
from .block_quantize import block_dequantize
from .grouped_quantize import ALIGN, Groups, block_values_of_columns, check_rows, decode, scale_rows

__all__ = [
    "block_contract_groups", "block_multiply_groups", "contract_groups", "has_grouped_fp8",
    "has_grouped_products", "multiplies_codes", "multiply_groups", "scaled_contract_groups",
    "scaled_multiply_groups",
]  # fmt: skip

_BLOCK = 128
_GROUPED = ((9, 0), (10, 0))
_GROUPED_FP8 = (9, 0)
_SHORT = (torch.float16, torch.bfloat16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_lib = runtime.ops("grouped_gemm")


def _aligned(t: torch.Tensor) -> torch.Tensor:
    """Returns ``t`` or a copy that begins at a multiple of 16 bytes.

    torch.compile cannot ask where a tensor begins, so the ops do.
    """
    return t if _is_aligned(t) else t.clone()


def _is_aligned(t: torch.Tensor) -> bool:
    return t.storage_offset() * t.element_size() % ALIGN == 0


def _run_aligned(name, a, a_scale_inv, b, b_scale_inv, ends, out, *rest):
    """Calls a kernel, which needs addresses that are multiples of 16 bytes."""
    target = _aligned(out)
    getattr(_lib, name)(_aligned(a), a_scale_inv, _aligned(b), b_scale_inv, ends, target, *rest)
    if target is not out:
        out.copy_(target)


def _bind_aligned(name: str) -> Callable[..., None]:
    """Binds a product that copies what does not begin at a multiple of 16 bytes."""

    def call(*args: Any) -> None:
        _run_aligned(name, *args)

    def launch(*args: Any) -> Launch | None:
        if not all(_is_aligned(args[i]) for i in (0, 2, 5)):
            return None
        return Launch(runtime.function("grouped_gemm", name), args, 0)

    return bind("grouped_gemm", name, call, launch=launch)


_multiply = _bind_aligned("grouped_gemm_multiply")
_contract = _bind_aligned("grouped_gemm_contract")


def has_grouped_products(device: torch.device) -> bool:
    """Returns True if ``torch._grouped_mm`` supports groups of bfloat16 rows on the device."""
    return hasattr(torch, "_grouped_mm") and nvidia_capability(device) in _GROUPED


def has_grouped_fp8(device: torch.device) -> bool:
    """Returns True if apex_te has a kernel for grouped GEMMs of FP8 data on the device."""
    return nvidia_capability(device) == _GROUPED_FP8


@checked
def multiply_groups(a: torch.Tensor, b: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Multiplies each row by the matrix of its group: ``out[r] = b[g] @ a[r]``, row r in group g.

    Args:
        a: [rows, K] in a dtype that ``torch.mm`` supports.
        b: [groups, N, K] in the dtype of ``a``, one matrix for each group.
        groups: row ranges of the groups in ``a``.

    Returns:
        [rows, N] in the dtype of ``a``; rows after the last group have undefined values.

    Raises:
        ValueError: shapes do not match, or ``groups`` was made for another number of rows.
    """
    check_dense("multiply_groups", a=a, b=b, groups=groups.table)
    _check_operands("multiply_groups", a, b, groups)
    return _multiply_values(a, b, groups.ends)


def _multiply_values(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Computes ``multiply_groups`` unchecked, from the groups' ends, int32 [groups]."""
    if _has_kernel(a, b):
        return torch._grouped_mm(a, b.transpose(-2, -1), offs=ends)
    out = a.new_zeros((a.shape[0], b.shape[1]))
    if a.device.type == "cpu" and not is_traced():  # where the ends can be read
        for g, (begin, end) in enumerate(_places(ends, a.shape[0])):
            out[begin:end] = torch.mm(a[begin:end], b[g].t())
        return out
    group = _group_of_rows(ends, a.shape[0])
    zero = a.new_zeros(())
    for g in range(ends.numel()):
        own = (group == g)[:, None]
        # Other groups' rows are zeroed: on the CPU a NaN in a row can reach the row before it.
        out = torch.where(own, torch.mm(torch.where(own, a, zero), b[g].t()), out)
    return out


@checked
def contract_groups(
    a: torch.Tensor, b: torch.Tensor, groups: Groups, wide: bool = False
) -> torch.Tensor:
    """Multiplies each group's slices of two matrices: ``out[g] = a[:, i:j] @ b[i:j]``.

    Group g occupies i to j - 1 of the inner dimension. This is the wgrad of a grouped linear layer.

    Args:
        a: [M, rows] in a dtype that ``torch.mm`` supports.
        b: [rows, N] in the dtype of ``a``.
        groups: ranges of the groups in the inner dimension.
        wide: return unrounded float32 sums of 16-bit operands. Exception: where
            ``torch._grouped_mm`` multiplies, the result is bfloat16 anyway.

    Returns:
        [groups, M, N] in the dtype of the operands, or in float32 with ``wide``; the matrix of a
        group without rows has undefined values.

    Raises:
        ValueError: shapes do not match, or ``groups`` was made for another number of rows.
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
    """Computes ``contract_groups`` unchecked, from the groups' ends in K, int32 [groups]."""
    if _has_kernel(a, b):
        return torch._grouped_mm(a, b, offs=ends)
    parts = []
    slices: Any = None
    if a.device.type == "cpu" and not is_traced():  # where the ends can be read
        slices = _places(ends, a.shape[1])
    group: Any = None if slices else _group_of_rows(ends, a.shape[1])
    zero = a.new_zeros(())
    for g in range(ends.numel()):
        if slices:
            x, y = a[:, slice(*slices[g])], b[slice(*slices[g])]
        else:
            own: Any = group == g  # masked, not multiplied by 0: other groups may have NaN
            x, y = torch.where(own, a, zero), torch.where(own[:, None], b, zero)
        if not wide or a.dtype not in _SHORT:
            parts.append(torch.mm(x, y))
        elif a.is_cuda:
            parts.append(torch.mm(x, y, out_dtype=torch.float32))
        else:
            parts.append(torch.mm(x.float(), y.float()))
    return torch.stack(parts)


def _places(ends: torch.Tensor, most: int) -> list[tuple[int, int]]:
    """Returns where each group begins and ends, within ``most``, from a tensor on the CPU."""
    places, begin = [], 0
    for end in ends.tolist():
        places.append((begin, max(begin, min(end, most))))
        begin = places[-1][1]
    return places


def _check_operands(name: str, a: torch.Tensor, b: torch.Tensor, groups: Groups) -> None:
    """Raises ValueError unless a is [rows, K] and b [groups, N, K], with ``groups``' extents."""
    if a.dim() != 2 or b.dim() != 3 or b.shape[0] != groups.num_groups or b.shape[2] != a.shape[1]:
        raise ValueError(
            f"{name}: a and b must be [rows, K] and [{groups.num_groups}, N, K], "
            f"got {list(a.shape)} and {list(b.shape)}"
        )
    check_rows(name, a.shape[0], groups)


def _has_kernel(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns True if ``torch._grouped_mm`` takes the operands, with rows aligned to 16 bytes."""
    if a.dtype is not torch.bfloat16 or not has_grouped_products(a.device):
        return False
    fixed = (a.shape[0], b.shape[1]) if b.dim() == 2 else b.shape[1:]
    return fixed[0] % 8 == 0 and fixed[1] % 8 == 0


def _group_of_rows(ends: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns the group of each row, int32 [rows]; ``num_groups`` for rows that have no group."""
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
    """Computes ``multiply_groups`` of FP8 data, with a scale_inv for each row of a and matrix of b.

    Args:
        a: [rows, K] FP8.
        a_scale_inv: float32 [rows].
        b: [groups, N, K] FP8.
        b_scale_inv: float32 [groups].
        groups: row ranges of the groups in ``a``.
        fast: accumulate along K in the tensor cores only, which keep fewer bits than float32. If
            False, partial sums of 128 terms, or of all if they are 512 at most, are added in
            float32. Without a kernel for grouped FP8 GEMMs (see ``has_grouped_fp8``) the data is
            converted and this option is ignored; on a GPU sums are then rounded to bfloat16
            before they are scaled.

    Returns:
        [rows, N] bfloat16; rows after the last group have undefined values.

    Raises:
        ValueError: shapes do not match, or ``groups`` was made for another number of rows.
    """
    _check_operands("scaled_multiply_groups", a, b, groups)
    gemm_common.count_gemms()
    if multiplies_codes(a, b):  # the kernel checks the rest
        out = torch.empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16, device=a.device)
        _multiply(a, a_scale_inv, b, b_scale_inv, groups.ends, out, not fast)
        return out
    check_dense(
        "scaled_multiply_groups", a=a, b=b, a_scale_inv=a_scale_inv, b_scale_inv=b_scale_inv,
        groups=groups.table,
    )  # fmt: skip
    out = multiply_groups(_values(a), _values(b), groups)
    group = _group_of_rows(groups.ends, a.shape[0]).clamp_(max=groups.num_groups - 1)
    # One combined factor: multiplying by two would round the result twice.
    scale_rows(out, a_scale_inv * b_scale_inv[group])
    return out.to(torch.bfloat16)


@checked
def scaled_contract_groups(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    ends: torch.Tensor,
    fast: bool,
    wide: bool = False,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    """Computes ``contract_groups`` of columnwise FP8 data, with the scale_inv of each group.

    Args:
        a: [M, K] FP8. Along K each group begins at a multiple of 16 and is not empty, as in a
            columnwise copy from ``quantize_groups``.
        a_scale_inv: float32 [groups].
        b: [N, K] FP8, with the same groups along K.
        b_scale_inv: float32 [groups].
        ends: int32 [groups], the position in K after each group's last: ``Groups.column_ends``.
        fast: accumulate along K in the tensor cores only, as in ``scaled_multiply_groups``.
        wide: return unrounded float32 sums instead of bfloat16. Exception: where FP8 data is
            decoded and ``torch._grouped_mm`` multiplies it, the result is bfloat16 anyway.
        out: contiguous [groups, M, N] in a floating-point dtype to write instead of a new tensor.
        accumulate: add to ``out``, which must be given; a float32 ``out`` without intermediate
            rounding.

    Returns:
        ``out``, or [groups, M, N] in bfloat16 or float32.

    Raises:
        TypeError: ``ends`` is not int32 with one dimension.
        ValueError: ``out`` has another shape, is not contiguous, or is None with ``accumulate``.
    """
    if ends.dtype is not torch.int32 or ends.dim() != 1:
        actual = f"{ends.dtype} {list(ends.shape)}".removeprefix("torch.")
        raise TypeError(f"scaled_contract_groups: ends must be int32 [groups], got {actual}")
    shape = (ends.numel(), a.shape[0], b.shape[0])
    _check_out("scaled_contract_groups", out, accumulate, shape)
    gemm_common.count_gemms()
    if multiplies_codes(a, b):
        made, adds = _result(a, shape, wide, out, accumulate)
        _contract(a, a_scale_inv, b, b_scale_inv, ends, made, not fast, adds)
        return _stored(made, out, accumulate)
    check_dense(
        "scaled_contract_groups", a=a, b=b, a_scale_inv=a_scale_inv, b_scale_inv=b_scale_inv,
        ends=ends,
    )  # fmt: skip
    # torch's kernels do not check the ends.
    wide = wide or out is not None
    made = _contract_values(_values(a), _values(b).t(), ends.clamp(0, a.shape[1]), wide)
    # [groups * M] factors, one a row: [groups] alone would not keep a GPU busy.
    factor = (a_scale_inv * b_scale_inv)[:, None].expand(-1, a.shape[0]).contiguous().view(-1)
    scale_rows(made.flatten(0, 1), factor)
    return _stored(made if wide else made.to(torch.bfloat16), out, accumulate)


def _values(fp8_data: torch.Tensor) -> torch.Tensor:
    """Returns values whose products are rounded once on a CPU, which multiplies bfloat16 slowly."""
    values = decode(fp8_data)
    return values if values.is_cuda else values.float()


def _check_out(
    name: str, out: torch.Tensor | None, accumulate: bool, shape: tuple[int, ...]
) -> None:
    """Raises ValueError unless ``out`` is contiguous with ``shape``, or None and not needed."""
    if out is None:
        if accumulate:
            raise ValueError(f"{name}: out must be given with accumulate=True, got None")
    elif out.shape != shape or not out.is_contiguous():
        raise ValueError(
            f"{name}: out must be contiguous with shape {list(shape)}, got {list(out.shape)}"
        )


def _result(
    a: torch.Tensor, shape: tuple[int, ...], wide: bool, out: torch.Tensor | None, accumulate: bool
) -> tuple[torch.Tensor, bool]:
    """Returns what a kernel writes, ``out`` itself where it can, and True if it adds to it."""
    if out is not None and (
        out.dtype is torch.float32 or (out.dtype is torch.bfloat16 and not accumulate)
    ):
        return out, accumulate
    dtype = torch.float32 if wide or out is not None else torch.bfloat16
    return torch.empty(shape, dtype=dtype, device=a.device), False


def _stored(made: torch.Tensor, out: torch.Tensor | None, accumulate: bool) -> torch.Tensor:
    """Returns ``out`` with what a product made written or added to it, or else ``made``."""
    if out is None:
        return made
    if out is made:
        note_written(out)
        return out
    return out.add_(made) if accumulate else out.copy_(made)


@checked
def block_multiply_groups(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    groups: Groups,
) -> torch.Tensor:
    """Computes ``multiply_groups`` of FP8 data with block scales.

    Each partial sum of 128 products along K is scaled and accumulated in float32.

    Args:
        a, a_scale_inv: FP8 [rows, K] and its scales, float32, the rowwise copy from
            ``block_quantize_groups``.
        b, b_scale_inv: FP8 [groups, N, K] and its scales, float32, a copy from
            ``block_quantize_matrices``.
        groups: row ranges of the groups in ``a``.

    Returns:
        [rows, N] bfloat16; rows after the last group have undefined values.

    Raises:
        ValueError: shapes do not match, or ``groups`` was made for another number of rows.
    """
    name = "block_multiply_groups"
    check_dense(
        name, a=a, b=b, a_scale_inv=a_scale_inv, b_scale_inv=b_scale_inv, groups=groups.table
    )
    _check_operands(name, a, b, groups)
    gemm_common.count_gemms()
    out = torch.empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16, device=a.device)
    _block_multiply(a, a_scale_inv, b, b_scale_inv, groups.ends, out)
    return out


def _multiply_blocks(a, a_scale_inv, b, b_scale_inv, ends, out):
    """Multiplies by the kernel, or decoded data where there is none."""
    if multiplies_codes(a, b):
        _run_aligned("grouped_block_multiply", a, a_scale_inv, b, b_scale_inv, ends, out)
        return
    x = block_dequantize(a, a_scale_inv, dtype=torch.float32)
    scales = b_scale_inv.repeat_interleave(_BLOCK, 1)[:, : b.shape[1]]
    w = decode(b).float() * scales.repeat_interleave(_BLOCK, 2)[:, :, : b.shape[2]]
    out.copy_(_multiply_values(x, w, ends))


_block_multiply = bind("grouped_gemm", "grouped_block_multiply", _multiply_blocks)


@checked
def block_contract_groups(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    groups: Groups,
    wide: bool = False,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    *,
    b_block_rows: int = 1,
) -> torch.Tensor:
    """Computes ``contract_groups`` of columnwise FP8 data with block scales.

    Each partial sum of 128 products along K is scaled and accumulated in float32.

    Args:
        a, a_scale_inv: FP8 [M, groups.columns] and its scales, float32, the columnwise copy from
            ``block_quantize_groups``.
        b, b_scale_inv: FP8 [N, groups.columns] and its scales, with the same groups.
        groups: the groups.
        wide: return unrounded float32 sums instead of bfloat16.
        out: contiguous [groups, M, N] in a floating-point dtype to write instead of a new tensor.
        accumulate: add to ``out``, which must be given.
        b_block_rows: 128 if ``b`` was cast with ``columnwise_block_rows=128``, which is faster.

    Returns:
        ``out``, or [groups, M, N] in bfloat16 or float32, zeros for a group without rows.

    Raises:
        ValueError: ``out`` has another shape, is not contiguous, or is None with ``accumulate``; or
            ``b_block_rows`` is neither 1 nor 128.
    """
    if b_block_rows not in (1, _BLOCK):
        raise ValueError(
            f"block_contract_groups: b_block_rows must be 1 or 128, got {b_block_rows}"
        )
    check_dense(
        "block_contract_groups", a=a, b=b, a_scale_inv=a_scale_inv, b_scale_inv=b_scale_inv,
        groups=groups.table,
    )  # fmt: skip
    shape = (groups.num_groups, a.shape[0], b.shape[0])
    _check_out("block_contract_groups", out, accumulate, shape)
    gemm_common.count_gemms()
    made, adds = _result(a, shape, wide, out, accumulate)
    operands = a, a_scale_inv, b, b_scale_inv
    _block_contract(*operands, groups.column_ends, made, adds, b_block_rows)
    return _stored(made, out, accumulate)


def _contract_blocks(a, a_scale_inv, b, b_scale_inv, ends, out, accumulate, b_block_rows):
    """Multiplies by the kernel, or decoded data where there is none."""
    if multiplies_codes(a, b):
        name = "grouped_block_contract"
        rest = accumulate, b_block_rows
        _run_aligned(name, a, a_scale_inv, b, b_scale_inv, ends, out, *rest)
        return
    if b_block_rows == _BLOCK:  # the kernel reads the first scale of 128 rows
        lines = b_scale_inv[:, ::_BLOCK].repeat_interleave(_BLOCK, dim=1)
        b_scale_inv = lines[:, : b_scale_inv.shape[1]]
    x, y = (
        block_values_of_columns(data, scales, ends)
        for data, scales in ((a, a_scale_inv), (b, b_scale_inv))
    )
    made = _contract_values(x, y.t(), ends, wide=True)
    out.add_(made) if accumulate else out.copy_(made)


_block_contract = bind("grouped_gemm", "grouped_block_contract", _contract_blocks)


def multiplies_codes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns True if the suite's kernel multiplies the FP8 data, False if it must be decoded.

    The kernel needs sm_90. Rows of the operands and the result must be multiples of 16 bytes long.

    Args:
        a: [rows, K].
        b: [groups, N, K].
    """
    if a.dtype not in _FP8 or b.dtype not in _FP8 or not has_grouped_fp8(a.device):
        return False
    return a.shape[-1] % ALIGN == 0 and b.shape[-2] % 8 == 0
