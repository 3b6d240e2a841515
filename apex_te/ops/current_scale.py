"""Casts a matrix to FP8 with a scale computed from its amax, in two launches."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..runtime.named_arguments import former_fields
from . import fp8_output, reference_codec
from .binding import bind, checked, note_written
from .fp8_output import check_fp8_dtype

_fwd = bind("current_scale", "current_scale_fwd")
_cast = bind("current_scale", "current_scale_cast")
_amax = bind("current_scale", "current_scale_amax")


@former_fields(transposed="columnwise")
class CurrentScaleOutput(NamedTuple):
    """FP8 data of a matrix [rows, cols]; None for a copy that was not requested.

    Attributes:
        rowwise: FP8 [rows, cols].
        columnwise: FP8 [cols, rows], the transpose; [cols, rows rounded up to 16] with
            ``pad_columnwise``.
        scale: one float32 element, the scale that was used.
        scale_inv: one float32 element: 1 / scale, or infinity if the amax is infinite.
        amax: one float32 element, the amax from which the scale was computed.
    """

    rowwise: torch.Tensor | None
    columnwise: torch.Tensor | None
    scale: torch.Tensor
    scale_inv: torch.Tensor
    amax: torch.Tensor


@checked
def current_scale(
    x: torch.Tensor,
    fp8_dtype: torch.dtype,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    pad_columnwise: bool = False,
    eps: float = 0.0,
    pow2: bool = False,
    amax: torch.Tensor | None = None,
    out_rowwise: torch.Tensor | None = None,
    out_columnwise: torch.Tensor | None = None,
) -> CurrentScaleOutput:
    """Quantizes x: q = saturating_cast(float(x) * scale), scale = fp8_max / max |x|.

    An amax below ``eps`` counts as ``eps``. An amax of 0, infinity or NaN gives scale 1. An
    infinite scale becomes float32's largest number. Infinities become fp8_max in the FP8 data, but
    scale_inv is then infinite, and so are the dequantized values.

    Args:
        x: [rows, cols] float32, float16 or bfloat16; made contiguous if it is not.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2; on a CPU or an AMD GPU also their fnuz
            forms.
        rowwise: make the rowwise copy, [rows, cols].
        columnwise: make the columnwise copy, the transpose [cols, rows].
        pad_columnwise: pad the columnwise copy to [cols, rows rounded up to 16]; the added columns
            are zeros.
        eps: smallest amax, zero or more.
        pow2: round the scale down to a power of two.
        amax: one float32 element to use instead of max |x|, e.g. the maximum of ``tensor_amax``
            over ranks; it saves one launch. None: max |x| is computed.
        out_rowwise: contiguous [rows, cols] in ``fp8_dtype``, to write instead of a new tensor.
        out_columnwise: contiguous [cols, rows] in ``fp8_dtype``, padded or not, to write instead of
            a new tensor.

    Returns:
        The requested copies, and the scale, scale_inv and amax that were used.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match, ``eps`` is negative, or no copy is asked for
            or given.
    """
    check_fp8_dtype("current_scale", fp8_dtype, fnuz=True)
    x = fp8_output.contiguous_matrix("current_scale", x)
    given = [t for t in (out_rowwise, out_columnwise) if t is not None]
    row, col = fp8_output.outputs(
        "current_scale", x, fp8_dtype, rowwise, columnwise, out_rowwise, out_columnwise,
        pad_columnwise,
    )  # fmt: skip
    if amax is None:
        amax, scale, scale_inv = fp8_output.float_scalars(x, 3)
        amaxes = x.new_empty(fp8_output.MAX_AMAXES, dtype=torch.float32)
        _fwd(x, row, col, amax, scale, scale_inv, amaxes, eps, pow2)
    else:
        scale, scale_inv = fp8_output.float_scalars(x, 2)
        _cast(x, row, col, amax, scale, scale_inv, eps, pow2)
    note_written(*given)
    return CurrentScaleOutput(row, col, scale, scale_inv, amax)


@checked
def tensor_amax(x: torch.Tensor) -> torch.Tensor:
    """Computes max |x| as one float32 element; NaN exceeds infinity, and an empty x gives 0.

    Args:
        x: [rows, cols] float32, float16 or bfloat16; made contiguous if it is not.

    Raises:
        TypeError: x has a dtype that is not listed.
        ValueError: x does not have two dimensions.
    """
    x = fp8_output.contiguous_matrix("current_scale", x)
    (amax,) = fp8_output.float_scalars(x, 1)
    _amax(x, amax, x.new_empty(fp8_output.MAX_AMAXES, dtype=torch.float32))
    return amax


@checked
def scale_of(
    amax: torch.Tensor,
    fp8_dtype: torch.dtype,
    scale: torch.Tensor,
    scale_inv: torch.Tensor,
    *,
    eps: float = 0.0,
    pow2: bool = False,
) -> None:
    """Computes scale and scale_inv from ``amax`` by the rules of ``current_scale``.

    Args:
        amax: one float32 element.
        scale: one float32 element on the device of ``amax``; written.
        scale_inv: one float32 element on the device of ``amax``; written.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        eps: smallest amax, zero or more.
        pow2: round the scale down to a power of two.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match, or ``eps`` is negative.
    """
    check_fp8_dtype("current_scale", fp8_dtype, fnuz=True)
    # The cast of an empty matrix writes the scale alone.
    nothing = amax.new_empty((0, 0))
    codes = amax.new_empty((0, 0), dtype=fp8_dtype)
    _cast(nothing, codes, None, amax, scale, scale_inv, eps, pow2)
    note_written(scale, scale_inv)


def reference(
    x: torch.Tensor,
    fp8_dtype: torch.dtype,
    *,
    eps: float = 0.0,
    pow2: bool = False,
    amax: torch.Tensor | None = None,
) -> CurrentScaleOutput:
    """Computes ``current_scale`` in plain PyTorch, as its specification.

    x is [rows, cols] float32, float16 or bfloat16; ``amax``, one float32 element, replaces max |x|.
    It makes both copies, and rounds to FP8 by integer arithmetic on the bits.
    """
    if amax is None:
        amax = reference_codec.amax_of(x)
    scale = reference_codec.scale_of(amax, torch.finfo(fp8_dtype).max, eps, pow2)
    codes = reference_codec.encode_fp8(x.float() * scale, fp8_dtype)
    inverse = reference_codec.inverse_of(amax, scale)
    return CurrentScaleOutput(codes, codes.t().contiguous(), scale, inverse, amax)
