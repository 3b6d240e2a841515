"""Casts a matrix to FP8 with one scale for each row, and its transpose likewise."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..runtime.op_options import block_scales, scales_number
from . import reference_codec
from .binding import bind, checked, note_written
from .fp8_output import check_any_output, check_fp8_dtype, check_out_dtype, columnwise_length

_quantize = bind("row_quantize", "row_quantize")


class RowQuantized(NamedTuple):
    """FP8 data and scale_inv of a matrix [rows, cols]; None for a copy that was not requested.

    Attributes:
        rowwise: FP8 [rows, cols].
        rowwise_scale_inv: float32 [rows, 1].
        columnwise: FP8 [cols, rows], the transpose; [cols, rows rounded up to 16] with
            ``pad_columnwise``.
        columnwise_scale_inv: float32 [cols, 1].
    """

    rowwise: torch.Tensor | None
    rowwise_scale_inv: torch.Tensor | None
    columnwise: torch.Tensor | None
    columnwise_scale_inv: torch.Tensor | None


@checked
def row_quantize(
    x: torch.Tensor,
    fp8_dtype: torch.dtype,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    pad_columnwise: bool = False,
    column_scale: torch.Tensor | None = None,
    scales: str = "server",
    eps: float = 0.0,
    out: RowQuantized | None = None,
) -> RowQuantized:
    """Quantizes x with one scale for each row; the columnwise copy has one for each column of x.

    The scale of a row, and what it does to special values, follow ``block_quantize`` with the whole
    row as one block. With ``column_scale``, x is first multiplied by it in float32.

    Args:
        x: [rows, cols] float32, float16 or bfloat16; made contiguous if it is not.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise: make the rowwise copy, [rows, cols], and its scale_inv.
        columnwise: make the columnwise copy, the transpose [cols, rows], and its scale_inv.
        pad_columnwise: pad the columnwise copy to [cols, rows rounded up to 16]; the added columns
            are zeros.
        column_scale: float32 [cols], or None.
        scales: ``"server"`` (scale_inv is amax / fp8_max, by which values are divided), ``"pow2"``
            or ``"fp32"``, as in ``block_quantize``.
        eps: smallest amax; with ``"server"`` it is at least 1e-10.
        out: result of an earlier call, whose tensors are overwritten. It determines which copies
            are made; ``rowwise`` and ``columnwise`` are ignored.

    Returns:
        The requested copies, with scale_inv [rows, 1] and [cols, 1].

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match, ``eps`` is out of range, or ``scales`` is
            unknown.
    """
    check_fp8_dtype("row_quantize", fp8_dtype)
    number = scales_number("row_quantize", scales, None)
    given = out
    if x.dim() != 2:
        raise ValueError(f"row_quantize: x must have 2 dimensions, got shape {list(x.shape)}")
    if out is not None:
        check_out_dtype("row_quantize", fp8_dtype, out.rowwise, out.columnwise)
    else:
        check_any_output("row_quantize", rowwise, columnwise, None)
        (rows, cols), length = x.shape, columnwise_length(x.shape[0], pad_columnwise)
        out = RowQuantized(
            x.new_empty((rows, cols), dtype=fp8_dtype) if rowwise else None,
            x.new_empty((rows, 1), dtype=torch.float32) if rowwise else None,
            x.new_empty((cols, length), dtype=fp8_dtype) if columnwise else None,
            x.new_empty((cols, 1), dtype=torch.float32) if columnwise else None,
        )
    _quantize(x.contiguous(), column_scale, *out, eps, number)
    if given is not None:
        note_written(*given)
    return out


def reference(
    x: torch.Tensor,
    fp8_dtype: torch.dtype,
    *,
    column_scale: torch.Tensor | None = None,
    scales: str = "server",
    eps: float = 0.0,
) -> RowQuantized:
    """Computes ``row_quantize`` in plain PyTorch, as its specification.

    x is [rows, cols] float32, float16 or bfloat16; options are as in ``row_quantize``. It makes
    both copies, without padding, and rounds to FP8 by integer arithmetic on the bits.
    """
    values = x.float() if column_scale is None else x.float() * column_scale
    block_scales("row_quantize", scales, None)
    options = fp8_dtype, scales, eps, torch.finfo(x.dtype).max
    return RowQuantized(*_reference_rowwise(values, *options),
                        *_reference_rowwise(values.t(), *options))  # fmt: skip


def _reference_rowwise(
    values: torch.Tensor, fp8_dtype: torch.dtype, scales: str, eps: float, largest: float
) -> tuple[torch.Tensor, torch.Tensor]:
    # Magnitudes compare as integers, NaN above infinity; a zero stands for no elements.
    bits = F.pad(values.abs().contiguous().view(torch.int32), (0, 1))
    amax = bits.amax(1, keepdim=True).view(torch.float32)
    eps = max(eps, 1e-10) if scales == "server" else eps
    amax = torch.where(amax < eps, torch.full_like(amax, eps), amax)
    limit = torch.full_like(amax, torch.finfo(fp8_dtype).max)
    scale = amax / limit if scales == "server" else limit / amax
    scale = torch.where(torch.isinf(scale), largest, scale)
    if scales == "pow2":
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    scale = torch.where((amax > 0) & torch.isfinite(amax), scale, 1.0)
    scaled = values / scale if scales == "server" else values * scale
    inverse = scale if scales == "server" else 1.0 / scale
    inverse = torch.where(torch.isinf(amax), torch.inf, inverse)
    return reference_codec.encode_fp8(scaled, fp8_dtype).contiguous(), inverse
