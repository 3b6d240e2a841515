"""Casts a matrix to FP8 with one scale for each block of 1x128 or 128x128 elements, and back."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..runtime.named_arguments import former_fields
from ..runtime.op_options import block_scales, scales_number
from . import reference_codec
from .binding import bind, checked, note_written
from .fp8_output import check_any_output, check_fp8_dtype, check_out_dtype, columnwise_length

quantize_into = bind("block_quantize", "block_quantize")
_dequantize = bind("block_quantize", "block_dequantize")

_BLOCK = 128

# cuBLASLt reads the scales of blocks of 1x128 in units of 16 bytes along the rows, and therefore
# multiplies so many rows at a time.
ROW_MULTIPLE = 4


@former_fields(transposed="columnwise", transposed_scale_inv="columnwise_scale_inv")
class BlockQuantized(NamedTuple):
    """FP8 data and scale_inv of a matrix [rows, cols]; None for a copy that was not requested.

    Below, ``block_rows`` and ``columnwise_block_rows`` are the arguments of ``block_quantize``: 1
    or 128 rows in a scaling block.

    Attributes:
        rowwise: FP8 [rows, cols].
        rowwise_scale_inv: float32 of shape ``scale_shape(rows, cols, block_rows)``.
        columnwise: FP8 [cols, rows], the transpose; [cols, rows rounded up to 16] with
            ``pad_columnwise``.
        columnwise_scale_inv: float32 of shape ``scale_shape(cols, rows, columnwise_block_rows)``.
    """

    rowwise: torch.Tensor | None
    rowwise_scale_inv: torch.Tensor | None
    columnwise: torch.Tensor | None
    columnwise_scale_inv: torch.Tensor | None

    def of_rows(self, rows: int) -> BlockQuantized:
        """Returns these copies with the rowwise copy cut to its first ``rows`` rows."""
        if self.rowwise is None or self.rowwise.shape[0] == rows:
            return self
        return self._replace(rowwise=self.rowwise[:rows])


def scale_shape(rows: int, cols: int, block_rows: int) -> tuple[int, int]:
    """Returns the shape of the scale_inv tensor of FP8 data [rows, cols], as cuBLASLt reads it.

    Args:
        rows: rows of the copy, rowwise or columnwise.
        cols: columns of the copy, the inner dimension K of a GEMM.
        block_rows: 1 (blocks of 1x128) or 128 (128x128).

    Returns:
        1x128: (ceil(cols / 128), rows rounded up to a multiple of 4), as scales are stored
        transposed. 128x128: (ceil(rows / 128), ceil(cols / 128) rounded up to a multiple of 4).
    """
    blocks = -(-cols // _BLOCK)
    if block_rows == 1:
        return blocks, -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
    return -(-rows // _BLOCK), -(-blocks // 4) * 4


@checked
def block_quantize(
    x: torch.Tensor,
    fp8_dtype: torch.dtype,
    *,
    block_rows: int = 1,
    columnwise_block_rows: int | None = None,
    rowwise: bool = True,
    columnwise: bool = True,
    pad_columnwise: bool = False,
    scales: str | None = None,
    pow2: bool | None = None,
    eps: float = 0.0,
    amax: torch.Tensor | None = None,
    out: BlockQuantized | None = None,
) -> BlockQuantized:
    """Quantizes x: q = saturating_cast(float(x) * scale), scale = fp8_max / amax of each block.

    With ``scales="server"``, the rule of inference engines, q = saturating_cast(float(x) / s) and
    scale_inv = s = amax / fp8_max, both rounded to nearest.

    A block's amax below ``eps`` counts as ``eps``. An amax of 0, infinity or NaN gives scale 1, so
    that NaN stays NaN. An infinity saturates, but its block's scale_inv is infinite, so that the
    block's dequantized values are infinite, or NaN where the FP8 value is 0. An infinite scale
    becomes the largest finite value of x's dtype. With blocks of 1x128 the columnwise copy has
    blocks of 128 elements of a column of x, and its own scales. With blocks of 128x128 it is the
    transposed rowwise copy.

    With blocks of 1x128 the storage of a new rowwise copy holds up to 3 further rows of zeros, to a
    multiple of 4 rows, so that ``block_scaled_gemm`` does not have to copy it.

    Args:
        x: [rows, cols] float32, float16 or bfloat16; made contiguous if it is not.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        block_rows: 1 (blocks of 1x128) or 128 (128x128).
        columnwise_block_rows: the same of the columnwise copy. None is ``block_rows``; 128 with
            ``block_rows=1`` gives the operand ``b`` of a weight gradient by
            ``block_scaled_gemm``'s faster form.
        rowwise: make the rowwise copy, [rows, cols], and its scale_inv.
        columnwise: make the columnwise copy, the transpose [cols, rows], and its scale_inv.
        pad_columnwise: pad the columnwise copy to [cols, rows rounded up to 16]; the added columns
            are zeros. The shape of ``columnwise_scale_inv`` does not change.
        scales: ``"pow2"`` rounds scales down to powers of two, ``"fp32"`` does not, ``"server"``
            has those of vLLM's casts. None is ``"pow2"``.
        pow2: former form of ``scales``: True is ``"pow2"``, False ``"fp32"``.
        eps: smallest amax; with ``"server"`` it is at least 1e-10.
        amax: one float32 element, becomes max(amax, max |x| of the matrix); NaN counts as largest.
            None computes no amax.
        out: result of an earlier call, whose tensors are overwritten. It determines which copies
            are made; ``rowwise`` and ``columnwise`` are ignored.

    Returns:
        FP8 data, and scale_inv in the layout of ``scale_shape``: 1 / scale, or infinity if the
        block's amax is infinite. Padding of scale_inv is 1. Blocks at the matrix's edges may be
        smaller.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match, ``block_rows``, ``columnwise_block_rows`` or
            ``eps`` is out of range, ``scales`` is unknown, or ``pow2`` contradicts it.
    """
    check_fp8_dtype("block_quantize", fp8_dtype)
    number = scales_number("block_quantize", scales, pow2)
    given = out
    column_block_rows = block_rows if columnwise_block_rows is None else columnwise_block_rows
    if x.dim() != 2:
        raise ValueError(f"block_quantize: x must have 2 dimensions, got shape {list(x.shape)}")
    if out is not None:
        check_out_dtype("block_quantize", fp8_dtype, out.rowwise, out.columnwise)
    else:
        check_any_output("block_quantize", rowwise, columnwise, amax)
        out = allocate(
            x, x.shape[0], x.shape[1], fp8_dtype, (block_rows, column_block_rows), rowwise,
            columnwise, pad_columnwise,
        )  # fmt: skip
    quantize_into(x.contiguous(), *out, amax, block_rows, column_block_rows, eps, number)
    if given is not None or amax is not None:
        note_written(amax, *(given or ()))
    return out.of_rows(x.shape[0])


def allocate(
    x: torch.Tensor,
    rows: int,
    cols: int,
    fp8_dtype: torch.dtype,
    block_rows: tuple[int, int],
    rowwise: bool,
    columnwise: bool,
    pad_columnwise: bool,
) -> BlockQuantized:
    """Returns uninitialised outputs of ``block_quantize`` for a matrix [rows, cols] on x's device.

    ``block_rows`` is that of either copy. If the first is 1, the rowwise copy has rows rounded up
    to a multiple of ``ROW_MULTIPLE``, as ``block_scaled_gemm`` reads them.
    """
    row_data = row_scales = column_data = column_scales = None
    if rowwise:
        stored = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE if block_rows[0] == 1 else rows
        row_data = x.new_empty((stored, cols), dtype=fp8_dtype)
        row_scales = x.new_empty(scale_shape(rows, cols, block_rows[0]), dtype=torch.float32)
    if columnwise:
        length = columnwise_length(rows, pad_columnwise)
        column_data = x.new_empty((cols, length), dtype=fp8_dtype)
        column_scales = x.new_empty(scale_shape(cols, rows, block_rows[1]), dtype=torch.float32)
    return BlockQuantized(row_data, row_scales, column_data, column_scales)


@checked
def block_dequantize(
    fp8_data: torch.Tensor,
    scale_inv: torch.Tensor,
    *,
    block_rows: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiplies FP8 data by its blocks' scale_inv and rounds to nearest even.

    Args:
        fp8_data: [rows, cols] FP8, a rowwise or a columnwise copy.
        scale_inv: float32 of shape scale_shape(rows, cols, block_rows), of that copy.
        block_rows: 1 or 128.
        dtype: dtype of a new tensor: float32, float16 or bfloat16.
        out: [rows, cols] to write, in one of these dtypes; a new tensor unless given.

    Returns:
        [rows, cols]: ``out`` or the new tensor. A columnwise copy gives the transpose of the
        quantized matrix.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match.
    """
    given = out
    if out is None:
        out = torch.empty_like(fp8_data, dtype=dtype, memory_format=torch.contiguous_format)
    _dequantize(fp8_data.contiguous(), scale_inv, out, block_rows)
    note_written(given)
    return out


def reference(
    x: torch.Tensor,
    fp8_dtype: torch.dtype,
    *,
    block_rows: int = 1,
    columnwise_block_rows: int | None = None,
    scales: str | None = None,
    pow2: bool | None = None,
    eps: float = 0.0,
) -> BlockQuantized:
    """Computes ``block_quantize`` in plain PyTorch, as its specification.

    x is [rows, cols] float32, float16 or bfloat16; options are as in ``block_quantize``. It makes
    both copies, without padding, and rounds to FP8 by integer arithmetic on the bits.
    """
    options = block_scales("block_quantize", scales, pow2), eps
    column_block_rows = block_rows if columnwise_block_rows is None else columnwise_block_rows
    return BlockQuantized(
        *_reference_rowwise(x, fp8_dtype, block_rows, *options),
        *_reference_rowwise(x.t(), fp8_dtype, column_block_rows, *options),
    )


def _reference_rowwise(
    x: torch.Tensor, fp8_dtype: torch.dtype, block_rows: int, scales: str, eps: float
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
    eps = max(eps, 1e-10) if scales == "server" else eps
    amax = torch.where(amax < eps, torch.tensor(eps, dtype=torch.float32, device=x.device), amax)
    # A Python number over a tensor would be its reciprocal times the number: two roundings.
    limit = torch.full_like(amax, torch.finfo(fp8_dtype).max)
    scale = amax / limit if scales == "server" else limit / amax
    scale = torch.where(torch.isinf(scale), torch.finfo(x.dtype).max, scale)
    if scales == "pow2":
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    scale = torch.where((amax > 0) & torch.isfinite(amax), scale, torch.ones_like(scale))
    each = scale[:, None, :, None]
    values_of_codes = blocks / each if scales == "server" else blocks * each
    codes = reference_codec.encode_fp8(values_of_codes, fp8_dtype)
    codes = codes.view(torch.uint8).reshape(values.shape)[:rows, :cols].contiguous()
    inverse = scale if scales == "server" else 1.0 / scale
    inverse = torch.where(torch.isinf(amax), torch.inf, inverse)
    inverse = inverse.t() if block_rows == 1 else inverse
    padded = F.pad(inverse, (0, -inverse.shape[1] % 4), value=1.0).contiguous()
    return codes.view(fp8_dtype), padded


def reference_dequantize(
    fp8_data: torch.Tensor, scale_inv: torch.Tensor, *, block_rows: int = 1
) -> torch.Tensor:
    """Computes ``block_dequantize`` in plain PyTorch, in float32.

    ``fp8_data`` is FP8 [rows, cols], ``scale_inv`` float32 of shape ``scale_shape(rows, cols,
    block_rows)``.
    """
    rows, cols = fp8_data.shape
    scales = scale_inv.t() if block_rows == 1 else scale_inv
    scales = scales.repeat_interleave(block_rows, 0).repeat_interleave(_BLOCK, 1)
    return reference_codec.decode_fp8(fp8_data) * scales[:rows, :cols]
