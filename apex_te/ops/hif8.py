"""HiF8 (HiFloat8): encodes, decodes, and quantizes a matrix with one scale.

HiF8 data is a uint8 tensor. A value has up to 3 mantissa bits, the more the nearer its magnitude is
to 1: magnitudes of 2^-3 to 15 have 3. The largest finite value is 32768, the smallest magnitude
2^-22. There is no negative zero and one NaN (0x80).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..runtime.named_arguments import former_fields
from . import fp8_output, reference_codec
from .binding import bind, checked, note_written

# Values that MindSpeed scales an amax to, in the range of 3-bit mantissas and of 2-bit ones.
HIF8_15 = 15.0
HIF8_224 = 224.0

_quantize = bind("hif8", "hif8_quantize")
_current = bind("hif8", "hif8_current")
_cast = bind("hif8", "hif8_cast")
_decode = bind("hif8", "hif8_decode")


@former_fields(transposed="columnwise")
class HiF8Output(NamedTuple):
    """HiF8 data of a matrix [rows, cols]; None for a copy that was not requested.

    Attributes:
        rowwise: uint8 [rows, cols].
        columnwise: uint8 [cols, rows], the transpose; [cols, rows rounded up to 16] with
            ``pad_columnwise``.
        scale: one float32 element, the scale that was used.
        scale_inv: one float32 element: 1 / scale, or infinity if ``quantize_current`` used an
            infinite amax.
        amax: one float32 element: from ``quantize`` the given tensor or None, from
            ``quantize_current`` the amax that was used.
    """

    rowwise: torch.Tensor | None
    columnwise: torch.Tensor | None
    scale: torch.Tensor
    scale_inv: torch.Tensor
    amax: torch.Tensor | None


@checked
def encode(x: torch.Tensor, *, saturate: bool = True) -> torch.Tensor:
    """Converts x to HiF8 without a scale, rounding halves away from zero.

    Args:
        x: any shape, float32, float16 or bfloat16; made contiguous if it is not.
        saturate: convert magnitudes of 40960 and above, including infinity, to 32768. If False,
            they become infinity.

    Returns:
        uint8 in x's shape. NaN of either sign is 0x80, magnitudes below 2^-23 are 0x00.

    Raises:
        TypeError: x has a dtype that is not listed.
    """
    matrix = x.contiguous().reshape(1, -1)
    codes = torch.empty_like(matrix, dtype=torch.uint8)
    _quantize(matrix, None, codes, None, None, None, saturate)
    return codes.reshape(x.shape)


@checked
def decode(
    fp8_data: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    *,
    scale_inv: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Converts HiF8 data to ``dtype``, times ``scale_inv`` if given, rounding once.

    Args:
        fp8_data: any shape, uint8; made contiguous if it is not.
        dtype: dtype of a new tensor: float32, float16 or bfloat16.
        scale_inv: one float32 element on the device of ``fp8_data``; None stands for 1.
        out: contiguous tensor of the shape of ``fp8_data`` to write instead of a new one, in one of
            these dtypes.

    Returns:
        The values, in the shape of ``fp8_data``: ``out`` or the new tensor.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: ``out`` does not have the shape of ``fp8_data`` or is not contiguous.
    """
    given = out is not None
    if out is None:
        out = fp8_data.new_empty(fp8_data.shape, dtype=dtype)
    elif out.shape != fp8_data.shape or not out.is_contiguous():
        raise ValueError(
            f"hif8_decode: out must be contiguous with shape {list(fp8_data.shape)}, got shape "
            f"{list(out.shape)} with strides {list(out.stride())}"
        )
    _decode(fp8_data.contiguous().view(-1), scale_inv, out.view(-1))
    if given:
        note_written(out)
    return out


@checked
def quantize(
    x: torch.Tensor,
    scale: torch.Tensor,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    pad_columnwise: bool = False,
    amax: torch.Tensor | None = None,
    saturate: bool = True,
    out_rowwise: torch.Tensor | None = None,
    out_columnwise: torch.Tensor | None = None,
) -> HiF8Output:
    """Quantizes x: q = encode(float(x) * scale) with a given scale, in one pass.

    Args:
        x: [rows, cols] float32, float16 or bfloat16; made contiguous if it is not.
        scale: one float32 element on x's device.
        rowwise: make the rowwise copy, [rows, cols].
        columnwise: make the columnwise copy, the transpose [cols, rows].
        pad_columnwise: pad the columnwise copy to [cols, rows rounded up to 16]; the added columns
            are zeros.
        amax: one float32 element, becomes max(amax, max |x|), before scaling; NaN counts as
            largest. None computes no amax.
        saturate: as in ``encode``.
        out_rowwise: contiguous uint8 [rows, cols] to write instead of a new tensor.
        out_columnwise: contiguous uint8 [cols, rows], padded or not, to write instead of a new
            tensor.

    Returns:
        The copies as uint8, ``scale``, 1 / scale, and ``amax``.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match, or no copy is asked for or given.
    """
    x = fp8_output.contiguous_matrix("hif8_quantize", x)
    given = [t for t in (out_rowwise, out_columnwise, amax) if t is not None]
    row, col = fp8_output.outputs(
        "hif8_quantize", x, torch.uint8, rowwise, columnwise, out_rowwise, out_columnwise,
        pad_columnwise,
    )  # fmt: skip
    (scale_inv,) = fp8_output.float_scalars(x, 1)
    _quantize(x, scale, row, col, amax, scale_inv, saturate)
    note_written(*given)
    return HiF8Output(row, col, scale, scale_inv, amax)


@checked
def quantize_current(
    x: torch.Tensor,
    target: float = HIF8_15,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    pad_columnwise: bool = False,
    eps: float = 0.0,
    pow2: bool = False,
    amax: torch.Tensor | None = None,
    saturate: bool = True,
    out_rowwise: torch.Tensor | None = None,
    out_columnwise: torch.Tensor | None = None,
) -> HiF8Output:
    """Quantizes x: q = encode(float(x) * scale), scale = target / max |x|, in two launches.

    The scale follows the rules of ``current_scale``. An amax below ``eps`` is first raised to
    ``eps``. If it is then 0, infinite or NaN, the scale is 1. An infinite scale becomes float32's
    largest number. For an infinite amax, scale_inv is infinite, so that saturation does not hide
    the infinity.

    Args:
        x: [rows, cols] float32, float16 or bfloat16; made contiguous if it is not.
        target: value to which the amax is scaled: HIF8_15 for inputs and weights, HIF8_224 for
            gradients.
        rowwise: make the rowwise copy, [rows, cols].
        columnwise: make the columnwise copy, the transpose [cols, rows].
        pad_columnwise: pad the columnwise copy to [cols, rows rounded up to 16]; the added columns
            are zeros.
        eps: lower bound of the amax, zero or more.
        pow2: round the scale down to a power of two.
        amax: one float32 element to use instead of max |x|, which saves one launch; None computes
            max |x|.
        saturate: as in ``encode``.
        out_rowwise: contiguous uint8 [rows, cols] to write instead of a new tensor.
        out_columnwise: contiguous uint8 [cols, rows], padded or not, to write instead of a new
            tensor.

    Returns:
        The copies as uint8, and the scale, scale_inv and amax that were used.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match, ``target`` or ``eps`` is out of range, or no
            copy is asked for or given.
    """
    x = fp8_output.contiguous_matrix("hif8_current", x)
    given = [t for t in (out_rowwise, out_columnwise) if t is not None]
    row, col = fp8_output.outputs(
        "hif8_current", x, torch.uint8, rowwise, columnwise, out_rowwise, out_columnwise,
        pad_columnwise,
    )  # fmt: skip
    if amax is None:
        amax, scale, scale_inv = fp8_output.float_scalars(x, 3)
        amaxes = x.new_empty(fp8_output.MAX_AMAXES, dtype=torch.float32)
        _current(x, row, col, amax, scale, scale_inv, amaxes, target, eps, pow2, saturate)
    else:
        scale, scale_inv = fp8_output.float_scalars(x, 2)
        _cast(x, row, col, amax, scale, scale_inv, target, eps, pow2, saturate)
    note_written(*given)
    return HiF8Output(row, col, scale, scale_inv, amax)


def reference_encode(values: torch.Tensor, *, saturate: bool = True) -> torch.Tensor:
    """Computes ``encode`` of float32 values in plain PyTorch, as its specification."""
    table = _values().to(values.device)
    # Positive finite values in order, their codes, and the midpoints between neighbours: a value
    # at a midpoint or above belongs to the upper one.
    magnitudes, codes = table[:128].sort()
    midpoints = (magnitudes[:-2].double() + magnitudes[1:-1].double()) / 2
    a = values.abs().double()
    index = torch.bucketize(a, midpoints, right=True)
    result = codes[index]
    result = torch.where(a >= 40960, torch.full_like(result, 0x6E if saturate else 0x6F), result)
    result = torch.where((values < 0) & (result != 0), result | 0x80, result)
    return torch.where(torch.isnan(values), torch.full_like(result, 0x80), result).to(torch.uint8)


def reference_decode(fp8_data: torch.Tensor) -> torch.Tensor:
    """Converts HiF8 data to float32 by a table made from the format's definition."""
    return _values().to(fp8_data.device)[fp8_data.to(torch.int64)]


def reference_quantize(
    x: torch.Tensor, scale: torch.Tensor, *, saturate: bool = True
) -> HiF8Output:
    """Computes ``quantize`` in plain PyTorch, as its specification.

    Both copies are made, without padding. The amax of the result is always max |x|.
    """
    codes = reference_encode(x.float() * scale, saturate=saturate)
    amax = reference_codec.amax_of(x)
    return HiF8Output(codes, codes.t().contiguous(), scale, 1.0 / scale, amax)


def reference_quantize_current(
    x: torch.Tensor,
    target: float = HIF8_15,
    *,
    eps: float = 0.0,
    pow2: bool = False,
    amax: torch.Tensor | None = None,
    saturate: bool = True,
) -> HiF8Output:
    """Computes ``quantize_current`` in plain PyTorch, as its specification.

    Both copies are made, without padding.
    """
    if amax is None:
        amax = reference_codec.amax_of(x)
    scale = reference_codec.scale_of(amax, target, eps, pow2)
    out = reference_quantize(x, scale, saturate=saturate)
    return out._replace(amax=amax, scale_inv=reference_codec.inverse_of(amax, scale))


def _values() -> torch.Tensor:
    """Returns the values of the bytes 0 to 255, float32 [256]."""
    # (prefix in the 7 bits below the sign, its length, exponent bits)
    zones = [(0b11, 2, 4), (0b10, 2, 3), (0b01, 2, 2), (0b001, 3, 1), (0b0001, 4, 0)]
    values = []
    for p in range(128):
        value = 2.0 ** (p - 23) if p else 0.0
        for prefix, length, exponent_bits in zones:
            if p >> (7 - length) != prefix:
                continue
            mantissa_bits = 7 - length - exponent_bits
            field = p >> mantissa_bits & ((1 << exponent_bits) - 1)
            exponent = 0
            if exponent_bits:
                top = 1 << (exponent_bits - 1)
                magnitude = top | (field & (top - 1))
                exponent = -magnitude if field & top else magnitude
            fraction = (p & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
            value = (1 + fraction) * 2.0**exponent
        values.append(float("inf") if p == 0x6F else value)
    negative = [-v for v in values]
    negative[0] = float("nan")
    return torch.tensor(values + negative, dtype=torch.float32)
