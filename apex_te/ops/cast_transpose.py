"""Casts a matrix to FP8 with a given scale, to a rowwise copy, a columnwise one or both at once."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..runtime import scratch_sizes
from ..runtime.named_arguments import former_fields
from . import fp8_output, reference_codec
from .binding import bind, checked, note_written
from .fp8_output import FP8_DTYPES, check_fp8_dtype

_call = bind("cast_transpose", "cast_transpose")


@former_fields(transposed="columnwise")
class CastTransposeOutput(NamedTuple):
    """FP8 data of a matrix [rows, cols]; None for a result that was not requested.

    Attributes:
        rowwise: FP8 [rows, cols].
        columnwise: FP8 [cols, rows], the transpose; [cols, rows rounded up to 16] with
            ``pad_columnwise``.
        scale_inv: one float32 element.
        dbias: [cols] in the matrix's dtype, its column sums.
    """

    rowwise: torch.Tensor | None
    columnwise: torch.Tensor | None
    scale_inv: torch.Tensor
    dbias: torch.Tensor | None


@checked
def cast_transpose(
    x: torch.Tensor,
    scale: torch.Tensor,
    fp8_dtype: torch.dtype,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    pad_columnwise: bool = False,
    amax: torch.Tensor | None = None,
    scale_inv: torch.Tensor | None = None,
    with_dbias: bool = False,
    noop: torch.Tensor | None = None,
    out_rowwise: torch.Tensor | None = None,
    out_columnwise: torch.Tensor | None = None,
) -> CastTransposeOutput:
    """Quantizes x: q = saturating_cast(float(x) * scale), rounded to nearest even; NaN stays NaN.

    Args:
        x: [rows, cols] float32, float16 or bfloat16; made contiguous if it is not.
        scale: one float32 element on x's device.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2; on a CPU or an AMD GPU also their fnuz
            forms.
        rowwise: make the rowwise copy, [rows, cols].
        columnwise: make the columnwise copy, the transpose [cols, rows].
        pad_columnwise: pad the columnwise copy to [cols, rows rounded up to 16]; the added columns
            are zeros.
        amax: one float32 element, becomes max(amax, max |x|), before scaling; NaN counts as
            largest. None computes no amax.
        scale_inv: one float32 element to receive 1 / scale; a new one unless given.
        with_dbias: also return the column sums of x, [cols] in x's dtype (deterministic).
        noop: one int32 element on x's device; if it is not 0, no output is written.
        out_rowwise: contiguous [rows, cols] in ``fp8_dtype``, to write instead of a new tensor.
        out_columnwise: contiguous [cols, rows] in ``fp8_dtype``, padded or not, to write instead of
            a new tensor.

    Returns:
        The requested copies, scale_inv and, with ``with_dbias``, the column sums.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match.
    """
    if fp8_dtype not in FP8_DTYPES:
        check_fp8_dtype("cast_transpose", fp8_dtype, fnuz=True)
    x = x.contiguous() if x.ndim == 2 else fp8_output.contiguous_matrix("cast_transpose", x)
    rows, cols = x.shape
    given = (out_rowwise, out_columnwise, scale_inv, amax)
    if rowwise and out_rowwise is None:
        out_rowwise = torch.empty_like(x, dtype=fp8_dtype)
    if columnwise and out_columnwise is None:
        length = fp8_output.columnwise_length(rows, pad_columnwise)
        out_columnwise = x.new_empty((cols, length), dtype=fp8_dtype)
    if scale_inv is None:
        scale_inv = torch.empty_like(scale)
    dbias = partial_sums = None
    if with_dbias:
        dbias = x.new_empty(cols)
        partial_sums = x.new_empty(
            (scratch_sizes.lines(rows, scratch_sizes.CAST_ROWS), cols), dtype=torch.float32
        )
    _call(x, scale, out_rowwise, out_columnwise, amax, scale_inv, dbias, partial_sums, noop)
    note_written(*given)
    return CastTransposeOutput(out_rowwise, out_columnwise, scale_inv, dbias)


def reference(
    x: torch.Tensor,
    scale: torch.Tensor,
    fp8_dtype: torch.dtype,
    *,
    amax: torch.Tensor | None = None,
) -> CastTransposeOutput:
    """Computes ``cast_transpose`` in plain PyTorch, as its specification.

    x is [rows, cols] float32, float16 or bfloat16; ``scale`` is one float32 element. It rounds to
    FP8 by integer arithmetic on the bits. All four results are computed; ``amax``, one float32
    element, is updated in place if given.
    """
    codes = reference_codec.encode_fp8(x.float() * scale, fp8_dtype)
    if amax is not None:
        found = reference_codec.amax_of(x).view(torch.int32)
        current = amax.view(torch.int32)
        current.copy_(torch.maximum(current, found.reshape(current.shape)))
    dbias = x.double().sum(0).to(x.dtype)
    return CastTransposeOutput(codes, codes.t().contiguous(), 1.0 / scale, dbias)
