"""FP8 data of a matrix with one scale for each block of 1x128 or 128x128 elements."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..runtime.former_names import former_fields
from . import reference_codec
from .argument_errors import checked
from .fp8_output import check_fp8_dtype, check_out_dtype
from .registration import bind

_quantize = bind("block_quantize", "block_quantize")
_dequantize = bind("block_quantize", "block_dequantize")

_BLOCK = 128


@former_fields(transposed="columnwise", transposed_scale_inv="columnwise_scale_inv")
class BlockQuantized(NamedTuple):
    """Result of ``block_quantize``, with None for a copy that was not asked for."""

    rowwise: torch.Tensor | None  # [rows, cols]
    rowwise_scale_inv: torch.Tensor | None  # scale_shape(rows, cols)
    columnwise: torch.Tensor | None  # [cols, rows]
    columnwise_scale_inv: torch.Tensor | None  # scale_shape(cols, rows)


def scale_shape(rows: int, cols: int, block_rows: int) -> tuple[int, int]:
    """Returns the shape of the scales of FP8 data [rows, cols], K along cols, as cuBLASLt reads it.

    1x128: [ceil(cols / 128), rows rounded up to 4]; 128x128: [ceil(rows / 128), ceil(cols / 128)
    rounded up to 4].
    """
    blocks = -(-cols // _BLOCK)
    if block_rows == 1:
        return blocks, -(-rows // 4) * 4
    return -(-rows // _BLOCK), -(-blocks // 4) * 4


@checked
def block_quantize(
    x: torch.Tensor,
    fp8_dtype: torch.dtype,
    *,
    block_rows: int = 1,
    rowwise: bool = True,
    columnwise: bool = True,
    pow2: bool = True,
    eps: float = 0.0,
    amax: torch.Tensor | None = None,
    out: BlockQuantized | None = None,
) -> BlockQuantized:
    """Quantizes q = saturating_cast(float(x) * scale), scale = fp8_max / amax of each block.

    A block's amax below ``eps`` counts as eps; an amax of 0, infinity or NaN gives scale 1, so that
    NaN stays NaN; an infinity saturates, but makes its block's scale_inv infinite and with it all
    values of the block; an infinite scale becomes the largest finite value of x's dtype. With
    1x128 blocks the columnwise copy is quantized from x along the other axis, with scales of its
    own; with 128x128 blocks its bytes are those of the rowwise copy, transposed.

    Args:
        x: [rows, cols] float32, float16 or bfloat16; made contiguous if it is not.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        block_rows: 1 (blocks of 1x128) or 128 (128x128).
        rowwise: make [rows, cols] and its scale_inv.
        columnwise: make [cols, rows] and its scale_inv.
        pow2: round scales down to powers of two.
        eps: smallest amax.
        amax: one float32 element, becomes max(amax, max |x|); NaN counts as largest.
        out: written instead of new tensors.

    Returns:
        FP8 data, and scale_inv in the layout of ``scale_shape``: 1 / scale, infinite where the amax
        is; places beyond the matrix hold 1. Ragged edges are blocks of what is there.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: a shape, device, block_rows or eps that does not fit.
    """
    check_fp8_dtype("block_quantize", fp8_dtype)
    if x.dim() != 2:
        raise ValueError(f"block_quantize: x must have 2 dimensions, got shape {list(x.shape)}")
    if out is not None:
        check_out_dtype("block_quantize", fp8_dtype, out.rowwise, out.columnwise)
    elif not (rowwise or columnwise or amax is not None):
        raise ValueError("block_quantize: rowwise, columnwise or amax must be asked for")
    else:
        rows, cols = x.shape

        def pair(rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
            return (
                x.new_empty((rows, cols), dtype=fp8_dtype),
                x.new_empty(scale_shape(rows, cols, block_rows), dtype=torch.float32),
            )

        out = BlockQuantized(
            *(pair(rows, cols) if rowwise else (None, None)),
            *(pair(cols, rows) if columnwise else (None, None)),
        )
    _quantize(x.contiguous(), *out, amax, block_rows, eps, pow2)
    return out


@checked
def block_dequantize(
    fp8_data: torch.Tensor,
    scale_inv: torch.Tensor,
    *,
    block_rows: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes the values of FP8 data, each times its block's scale_inv, rounded to nearest even.

    Args:
        fp8_data: [rows, cols] FP8; of either layout: a columnwise copy gives x columnwise.
        scale_inv: float32 of shape scale_shape(rows, cols, block_rows).
        block_rows: 1 or 128.
        dtype: float32, float16 or bfloat16, of a new tensor.
        out: [rows, cols] to write.

    Raises:
        TypeError: a dtype that does not match.
        ValueError: a shape or device that does not match.
    """
    if out is None:
        out = torch.empty_like(fp8_data, dtype=dtype, memory_format=torch.contiguous_format)
    _dequantize(fp8_data.contiguous(), scale_inv, out, block_rows)
    return out


def reference(
    x: torch.Tensor,
    fp8_dtype: torch.dtype,
    *,
    block_rows: int = 1,
    pow2: bool = True,
    eps: float = 0.0,
) -> BlockQuantized:
    """Computes ``block_quantize`` in plain PyTorch with integer rounding; the specification."""
    rowwise = _reference_rowwise(x, fp8_dtype, block_rows, pow2, eps)
    return BlockQuantized(*rowwise, *_reference_rowwise(x.t(), fp8_dtype, block_rows, pow2, eps))


def _reference_rowwise(
    x: torch.Tensor, fp8_dtype: torch.dtype, block_rows: int, pow2: bool, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, cols = x.shape
    values = F.pad(x.float(), (0, -cols % _BLOCK, 0, -rows % block_rows))
    blocks = values.reshape(
        values.shape[0] // block_rows, block_rows, values.shape[1] // _BLOCK, _BLOCK
    )
    # Magnitudes compare as integers, NaN above infinity; the last entry stands for no elements.
    bits = blocks.abs().view(torch.int32)
    amax = (
        bits.amax((1, 3)).view(torch.float32)
        if bits.numel()
        else bits.new_zeros((bits.shape[0], bits.shape[2])).view(torch.float32)
    )
    amax = torch.where(amax < eps, torch.tensor(eps, dtype=torch.float32, device=x.device), amax)
    # A Python number over a tensor would be its reciprocal times the number: two roundings.
    scale = torch.full_like(amax, torch.finfo(fp8_dtype).max) / amax
    scale = torch.where(torch.isinf(scale), torch.finfo(x.dtype).max, scale)
    if pow2:
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    scale = torch.where((amax > 0) & torch.isfinite(amax), scale, torch.ones_like(scale))
    codes = reference_codec.encode_fp8(blocks * scale[:, None, :, None], fp8_dtype)
    codes = codes.view(torch.uint8).reshape(values.shape)[:rows, :cols].contiguous()
    inverse = torch.where(torch.isinf(amax), torch.inf, 1.0 / scale)
    inverse = inverse.t() if block_rows == 1 else inverse
    padded = F.pad(inverse, (0, -inverse.shape[1] % 4), value=1.0).contiguous()
    return codes.view(fp8_dtype), padded


def reference_dequantize(
    fp8_data: torch.Tensor, scale_inv: torch.Tensor, *, block_rows: int = 1
) -> torch.Tensor:
    """Computes ``block_dequantize`` in plain PyTorch, in float32."""
    rows, cols = fp8_data.shape
    scales = scale_inv.t() if block_rows == 1 else scale_inv
    scales = scales.repeat_interleave(block_rows, 0).repeat_interleave(_BLOCK, 1)
    return reference_codec.decode_fp8(fp8_data) * scales[:rows, :cols]
