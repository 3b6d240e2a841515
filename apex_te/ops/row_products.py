"""GEMMs whose rows do not depend on each other: equal bits for any number of other rows.

BLAS libraries choose a kernel by the number of rows, and with it the order of sums along K. Here
that order is fixed:

- bfloat16 and FP8 blocks on sm_90 take the kernels of grouped GEMMs, with one group. They sum along
  K in order, in one block of threads for each tile of the result;
- other products take a fixed number of rows at a time, padded, so that the library sees one shape.
  Which of the rows one is must not matter; that is tested, not promised by the libraries.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from ..runtime.tracing import is_traced
from .gemm_common import float32_product
from .grouped_gemm import block_multiply_groups, has_grouped_products, multiplies_codes
from .grouped_quantize import Groups

__all__ = ["row_block_product", "row_product", "row_scaled_product"]

# Rows at a time, as a compromise: one row costs as much.
_CPU_ROWS, _GPU_ROWS = 32, 256
# torch._grouped_mm has other tiles for up to 128 rows.
_LEAST_ROWS = 256


def _one_group(rows: int, device: torch.device) -> torch.Tensor:
    """Returns the end of a group of ``rows`` rows, int32 [1]."""
    return torch.full((1,), rows, dtype=torch.int32, device=device)


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns ``x`` [some, cols] with zeros behind, up to ``rows``; a copy if it is not aligned."""
    if x.shape[0] < rows:
        bits = x.view(torch.uint8) if x.element_size() == 1 else x
        return functional.pad(bits, (0, 0, 0, rows - x.shape[0])).view(x.dtype)
    # Kernels may take elements before an aligned address apart.
    return x if is_traced() or x.data_ptr() % 64 == 0 else x.clone()


def _chunks(device: torch.device, rows: int) -> list[tuple[int, int, int]]:
    """Returns ``(begin, end, padded length)`` of the rows that are multiplied at a time."""
    step = _GPU_ROWS if device.type == "cuda" else _CPU_ROWS
    return [(begin, min(begin + step, rows), step) for begin in range(0, rows, step)]


def row_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes ``x @ weight.T + bias``, each row with the same bits whatever the others are.

    Args:
        x: [..., in], float32, float16 or bfloat16.
        weight: [out, in] in the dtype of ``x``.
        bias: [out] in the dtype of ``x``, or None; it is added to the rounded product on a GPU.

    Returns:
        [..., out] in the dtype of ``x``.

    Raises:
        RuntimeError: a shape does not match, by PyTorch.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    count, features = rows.shape[0], weight.shape[0]
    if _is_grouped(rows, weight):
        weights = weight.contiguous()[None].transpose(-2, -1)
        ends = _one_group(count, x.device)
        out = torch._grouped_mm(_padded(rows, max(count, _LEAST_ROWS)), weights, offs=ends)
        out = out if count >= _LEAST_ROWS else out[:count].clone()
        out = out if bias is None else out.add_(bias)
    else:
        # On the CPU in float32, rounded once: products in bfloat16 are slow there.
        is_cpu = x.device.type == "cpu"
        out = x.new_empty(count, features)
        w = (weight.float() if is_cpu and weight.dtype is not torch.float64 else weight).t()
        for begin, end, step in _chunks(x.device, count):
            part = _padded(rows[begin:end].to(w.dtype), step)
            made = float32_product(part, w)[: end - begin]
            out[begin:end] = made if bias is None else made + bias
    return torch.ops.aten._unsafe_view(out, (*x.shape[:-1], features))


def _is_grouped(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Returns True if torch's kernel for groups of bfloat16 rows takes the operands."""
    if x.dtype is not torch.bfloat16 or not has_grouped_products(x.device) or not x.shape[0]:
        return False
    return weight.shape[0] % 8 == 0 and weight.shape[1] % 8 == 0


def row_block_product(
    multiply: Callable[..., torch.Tensor],
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes ``a @ b.T + bias`` of FP8 data in blocks, rows as those of ``row_product``.

    Args:
        multiply: ``block_scaled_gemm`` of such operands, or a function with its arguments.
        a: [rows, K] FP8, with float32 ``a_scale_inv`` of blocks of 1x128.
        b: [N, K] FP8, with float32 ``b_scale_inv`` of blocks of 128x128.
        out_dtype: dtype of the result.
        bias: [N] or None.

    Returns:
        [rows, N] in ``out_dtype``.

    Errors are those of ``multiply``.
    """
    rows = a.shape[0]
    if out_dtype is torch.bfloat16 and rows and multiplies_codes(a, b[None]):
        table = _one_group(rows, a.device)
        groups = Groups(table, rows, 1)
        out = block_multiply_groups(a, a_scale_inv, b[None], b_scale_inv[None], groups)
        return out if bias is None else out.add_(bias)
    return _by_chunks(multiply, a, b, a_scale_inv.t(), b_scale_inv, out_dtype, bias, blocks=True)


def row_scaled_product(
    multiply: Callable[..., torch.Tensor],
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes ``a @ b.T + bias`` of FP8 data with scales of rows, rows as in ``row_product``.

    Args:
        multiply: ``rowwise_gemm`` of such operands, or a function with its arguments.
        a: [rows, K] FP8, with ``a_scale_inv`` float32 [rows, 1].
        b: [N, K] FP8, with ``b_scale_inv`` float32 [N, 1].
        out_dtype: dtype of the result.
        bias: [N] or None.

    Returns:
        [rows, N] in ``out_dtype``.

    Errors are those of ``multiply``.
    """
    return _by_chunks(multiply, a, b, a_scale_inv, b_scale_inv, out_dtype, bias, blocks=False)


def _by_chunks(
    multiply: Callable[..., torch.Tensor],
    a: torch.Tensor,
    b: torch.Tensor,
    scales: torch.Tensor,
    b_scale_inv: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
    blocks: bool,
) -> torch.Tensor:
    """Multiplies some rows of ``a`` and of ``scales`` [rows, some] at a time.

    With ``blocks`` their transposed scales are passed to ``multiply``.
    """
    out = torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    for begin, end, step in _chunks(a.device, a.shape[0]):
        own = _padded(scales[begin:end], step)
        own = own.t().contiguous() if blocks else own
        part = _padded(a[begin:end], step)
        made = multiply(part, b, own, b_scale_inv, out_dtype=out_dtype, bias=bias)
        out[begin:end] = made[: end - begin]
    return out
