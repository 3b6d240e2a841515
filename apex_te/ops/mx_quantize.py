"""MXFP8 data of a matrix: FP8 with one power-of-two scale for every 32 elements."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from .. import runtime
from ..runtime.named_arguments import former_fields
from . import reference_codec
from .binding import bind, checked, note_written
from .fp8_output import check_fp8_dtype, check_out_dtype, columnwise_length

_lib = runtime.ops("mx_quantize")
_BLOCK = 32
_SCALE_DTYPE = torch.float8_e8m0fnu


@former_fields(transposed="columnwise", transposed_scale="columnwise_scale")
class MXQuantized(NamedTuple):
    """MXFP8 data and scales of a matrix [rows, cols]; None for a copy that was not requested.

    Attributes:
        rowwise: FP8 [rows, cols].
        rowwise_scale: float8_e8m0fnu [rows, ceil(cols / 32)].
        columnwise: FP8 [cols, rows], the transpose; [cols, rows rounded up to 16] with
            ``pad_columnwise``.
        columnwise_scale: float8_e8m0fnu [cols, ceil(rows / 32)].
    """

    rowwise: torch.Tensor | None
    rowwise_scale: torch.Tensor | None
    columnwise: torch.Tensor | None
    columnwise_scale: torch.Tensor | None


@checked
def mx_quantize(
    x: torch.Tensor,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    pad_columnwise: bool = False,
    rounding: str = "up",
    out: MXQuantized | None = None,
) -> MXQuantized:
    """Quantizes x: q = saturating_cast(float(x) / 2^e), with one e for each block of 32 elements.

    A block is 32 elements of a row of x for the rowwise copy, and 32 elements of a column of x for
    the columnwise copy. The scale 2^e is computed from the block's amax. With ``rounding="up"`` it
    is the smallest 2^e that is at least amax / fp8_max (in float32), so that nothing saturates.
    With "floor" (OCP MX v1.0, section 6.3) e is floor(log2 amax) minus 8 for E4M3 or minus 15 for
    E5M2; an amax just below a power of two then saturates. The scale is NaN (0xFF) for a block with
    a NaN, 2^127 (0xFE) for one with an infinity, 2^-127 (0x00) for a block of zeros.

    Args:
        x: [rows, cols] float32, float16 or bfloat16; made contiguous if it is not. Extents need not
            be multiples of 32: the last block of a row or column may be shorter.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise: make the rowwise copy, [rows, cols], and its scales.
        columnwise: make the columnwise copy, the transpose [cols, rows], and its scales.
        pad_columnwise: pad the columnwise copy to [cols, rows rounded up to 16]; the added columns
            are zeros. Its scales are not padded.
        rounding: "up" or "floor".
        out: result of an earlier call with x's shape and ``fp8_dtype``, whose tensors are
            overwritten. It determines which copies are made; ``rowwise``, ``columnwise`` and
            ``pad_columnwise`` are ignored.

    Returns:
        The copies and their scales. Scales are row-major, one for each block, not in the tiled
        order that the matrix units of sm_100 read.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match, or ``rounding`` is not listed.
    """
    check_fp8_dtype("mx_quantize", fp8_dtype)
    given = out
    if rounding not in ("up", "floor"):
        raise ValueError(f"mx_quantize: rounding must be 'up' or 'floor', got {rounding!r}")
    if x.dim() != 2:
        raise ValueError(f"mx_quantize: x must have 2 dimensions, got shape {list(x.shape)}")
    if out is not None:
        check_out_dtype("mx_quantize", fp8_dtype, out.rowwise, out.columnwise)
        _check_scale("mx_quantize", "rowwise_scale", out.rowwise_scale)
        _check_scale("mx_quantize", "columnwise_scale", out.columnwise_scale)
    elif not (rowwise or columnwise):
        raise ValueError("mx_quantize: rowwise or columnwise must be asked for")
    else:
        rows, cols = x.shape
        # Ops of a compiled region see scales as bytes: inductor does not support float8_e8m0fnu.
        scale_dtype = torch.uint8 if torch.compiler.is_compiling() else _SCALE_DTYPE

        def pair(rows: int, cols: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
            return (
                x.new_empty((rows, length), dtype=fp8_dtype),
                x.new_empty((rows, -(-cols // _BLOCK)), dtype=scale_dtype),
            )

        length = columnwise_length(rows, pad_columnwise)
        out = MXQuantized(
            *(pair(rows, cols, cols) if rowwise else (None, None)),
            *(pair(cols, rows, length) if columnwise else (None, None)),
        )
    x, use_floor = x.contiguous(), rounding == "floor"
    if not torch.compiler.is_compiling():
        _quantize(x, *out, use_floor)
        if given is not None:
            note_written(*given)
        return out
    row, row_scale, col, col_scale = out
    _quantize(x, row, _as(row_scale, torch.uint8), col, _as(col_scale, torch.uint8), use_floor)
    return MXQuantized(row, _as(row_scale, _SCALE_DTYPE), col, _as(col_scale, _SCALE_DTYPE))


def _check_scale(op: str, name: str, scale: torch.Tensor | None) -> None:
    """Raises TypeError unless ``scale``, the argument ``name``, is None or float8_e8m0fnu."""
    if scale is not None and scale.dtype is not _SCALE_DTYPE:
        actual = str(scale.dtype).removeprefix("torch.")
        raise TypeError(f"{op}: {name} must have dtype float8_e8m0fnu, got {actual}")


def _as(scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Returns a view of scales in another dtype of one byte; None for None."""
    return None if scale is None else scale.view(dtype)


def _quantize_in_library(x, rowwise, rowwise_scale, columnwise, columnwise_scale, use_floor):
    row_scale, col_scale = (_as(s, _SCALE_DTYPE) for s in (rowwise_scale, columnwise_scale))
    _lib.mx_quantize(x, rowwise, row_scale, columnwise, col_scale, use_floor)


_quantize = bind("mx_quantize", "mx_quantize", _quantize_in_library)


@checked
def mx_dequantize(
    fp8_data: torch.Tensor,
    scale: torch.Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiplies MXFP8 data by its scales, exactly within the normal range of ``dtype``.

    Products outside that range are rounded to nearest even.

    Args:
        fp8_data: [rows, cols] FP8, a rowwise or a columnwise copy.
        scale: [rows, ceil(cols / 32)] float8_e8m0fnu, of that copy.
        dtype: dtype of a new tensor: float32, float16 or bfloat16.
        out: contiguous [rows, cols] to write, in one of these dtypes; a new tensor unless given.

    Returns:
        [rows, cols]: ``out`` or the new tensor. A columnwise copy gives the transpose of the
        quantized matrix.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match.
    """
    _check_scale("mx_dequantize", "scale", scale)
    given = out
    if out is None:
        out = torch.empty_like(fp8_data, dtype=dtype, memory_format=torch.contiguous_format)
    if torch.compiler.is_compiling():
        scale = scale.view(torch.uint8)
    _dequantize(fp8_data.contiguous(), scale, out)
    note_written(given)
    return out


def _dequantize_in_library(fp8_data, scale, out):
    _lib.mx_dequantize(fp8_data, scale.view(_SCALE_DTYPE), out)


_dequantize = bind("mx_quantize", "mx_dequantize", _dequantize_in_library)


def reference(
    x: torch.Tensor, fp8_dtype: torch.dtype = torch.float8_e4m3fn, *, rounding: str = "up"
) -> MXQuantized:
    """Computes ``mx_quantize`` in plain PyTorch, as its specification.

    x is [rows, cols] float32, float16 or bfloat16; ``rounding`` is "up" or "floor". Both copies are
    made, without padding. Rounding is integer arithmetic on the bits.
    """
    rowwise = _reference_rowwise(x, fp8_dtype, rounding)
    return MXQuantized(*rowwise, *_reference_rowwise(x.t(), fp8_dtype, rounding))


def _reference_rowwise(
    x: torch.Tensor, fp8_dtype: torch.dtype, rounding: str
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, cols = x.shape
    blocks = F.pad(x.float(), (0, -cols % _BLOCK))
    blocks = blocks.reshape(rows, blocks.shape[1] // _BLOCK, _BLOCK)
    # Magnitudes compare as integers, NaN above infinity.
    bits = blocks.abs().view(torch.int32)
    amax = bits.amax(2) if bits.numel() else bits.new_zeros(bits.shape[:2])
    fp8_max = torch.finfo(fp8_dtype).max
    if rounding == "floor":
        largest_exponent = 8 if fp8_dtype is torch.float8_e4m3fn else 15
        code = ((amax >> 23) - largest_exponent).clamp(min=0)
    else:
        ratio = amax.view(torch.float32) * (1 / torch.tensor(fp8_max, device=x.device))
        bits = ratio.view(torch.int32)
        exponent, mantissa = bits >> 23, bits & 0x7FFFFF
        is_above = torch.where(exponent > 0, mantissa > 0, mantissa > 0x400000)
        code = (exponent + is_above).clamp(max=254)
    infinity = 0x7F800000
    code = torch.where(amax == infinity, 254, torch.where(amax > infinity, 255, code))
    # ldexp in float64 is exact over the whole range; the product in float32 rounds once.
    multiplier = torch.ldexp(torch.ones_like(code, dtype=torch.float64), 127 - code).float()
    multiplier = torch.where(code == 255, float("nan"), multiplier)
    codes = reference_codec.encode_fp8(blocks * multiplier[..., None], fp8_dtype)
    codes = (
        codes.view(torch.uint8).reshape(rows, -1)[:, :cols]
        if codes.numel()
        else codes.view(torch.uint8).reshape(rows, cols)
    )
    return codes.contiguous().view(fp8_dtype), code.to(torch.uint8).view(_SCALE_DTYPE)


def reference_dequantize(fp8_data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Computes ``mx_dequantize`` in plain PyTorch, in float32.

    ``fp8_data`` is FP8 [rows, cols], ``scale`` float8_e8m0fnu [rows, ceil(cols / 32)].
    """
    code = scale.view(torch.uint8).to(torch.int32)
    factor = torch.ldexp(torch.ones_like(code, dtype=torch.float64), code - 127).float()
    factor = torch.where(code == 255, float("nan"), factor)
    factor = factor.repeat_interleave(_BLOCK, 1)[:, : fp8_data.shape[1]]
    return reference_codec.decode_fp8(fp8_data) * factor
