"""Encodes and decodes FP8 in plain PyTorch integer arithmetic, independently of torch's casts."""

from __future__ import annotations

import torch

# (largest finite value's fp32 bits, smallest normal's fp32 bits, mantissa shift, exponent bias,
# fp32 number whose ulp is the smallest subnormal)
_FORMATS = {
    torch.float8_e4m3fn: (0x43E00000, 0x3C800000, 20, 7, 2.0**14),
    torch.float8_e5m2: (0x47600000, 0x38800000, 21, 15, 2.0**7),
    torch.float8_e4m3fnuz: (0x43700000, 0x3C000000, 20, 8, 2.0**13),
    torch.float8_e5m2fnuz: (0x47600000, 0x38000000, 21, 16, 2.0**6),
}
_FLOAT_MAX = torch.finfo(torch.float32).max
# One code for NaN, 0x80; no infinity, no negative zero.
_FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def encode_fp8(values: torch.Tensor, fp8_dtype: torch.dtype) -> torch.Tensor:
    """Converts float32 values to FP8, rounding to nearest even and saturating; NaN becomes 0x7F.

    The rules are those of OCP OFP8 1.0 in saturating mode. Fnuz forms follow AMD's CDNA3
    instruction set: NaN becomes 0x80, and a value that rounds to zero loses its sign.
    """
    max_bits, min_normal_bits, shift, bias, magic = _FORMATS[fp8_dtype]
    bits = values.contiguous().view(torch.int32)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    clamped = magnitude.clamp(max=max_bits)
    half = (1 << (shift - 1)) - 1
    normal = (clamped - ((127 - bias) << 23) + half + ((clamped >> shift) & 1)) >> shift
    small = clamped.clamp(max=min_normal_bits).view(torch.float32)
    # torch.round rounds half to even; one step is the smallest subnormal, so the quotient is exact.
    step = magic * 2.0**-23
    subnormal = torch.round(small / step).to(torch.int32)
    codes = torch.where(clamped < min_normal_bits, subnormal, normal)
    is_fnuz = fp8_dtype in _FNUZ
    codes = torch.where((codes == 0) & is_fnuz, codes, codes | sign)
    nan = 0x80 if is_fnuz else 0x7F
    codes = torch.where(magnitude > 0x7F800000, nan, codes)
    return codes.to(torch.uint8).view(fp8_dtype)


def decode_fp8(fp8_data: torch.Tensor) -> torch.Tensor:
    """Decodes FP8 data to float32, exactly, by a table built from the format's definition.

    Raises KeyError for another dtype, also uint8, which does not tell the format.
    """
    return _decode_table(fp8_data.dtype).to(fp8_data.device)[
        fp8_data.view(torch.uint8).to(torch.int64)
    ]


def _decode_table(fp8_dtype: torch.dtype) -> torch.Tensor:
    """Returns the float32 value of each of the 256 codes of a format."""
    is_e4m3 = fp8_dtype is torch.float8_e4m3fn
    is_fnuz = fp8_dtype in _FNUZ
    shift, bias = _FORMATS[fp8_dtype][2:4]
    mantissa_bits = 23 - shift
    values = []
    for code in range(256):
        exponent = (code & 0x7F) >> mantissa_bits
        mantissa = code & ((1 << mantissa_bits) - 1)
        if is_fnuz:
            special = float("nan") if code == 0x80 else None
        elif is_e4m3:
            special = float("nan") if code & 0x7F == 0x7F else None
        elif exponent == 31:
            special = float("nan") if mantissa else float("inf")
        else:
            special = None
        fraction = mantissa / (1 << mantissa_bits)
        finite = (
            (1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias)
        )
        magnitude = finite if special is None else special
        values.append(-magnitude if code & 0x80 else magnitude)
    return torch.tensor(values, dtype=torch.float32)


def amax_of(x: torch.Tensor) -> torch.Tensor:
    """Returns max |x| as one float32 element; NaN exceeds infinity, and an empty x gives 0."""
    bits = x.float().abs().reshape(-1).view(torch.int32)
    found = bits.max() if bits.numel() else torch.zeros((), dtype=torch.int32, device=x.device)
    return found.reshape(1).view(torch.float32)


def scale_of(amax: torch.Tensor, target: float, eps: float, pow2: bool) -> torch.Tensor:
    """Returns target / amax in float32, by the rules of csrc/common/numerics/scaling.h.

    An amax below ``eps`` counts as ``eps``; one of 0, infinity or NaN gives scale 1.
    """
    amax = torch.where(amax < eps, torch.full_like(amax, eps), amax)
    scale = (torch.full_like(amax, target) / amax).clamp(max=_FLOAT_MAX)
    if pow2:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    usable = torch.isfinite(amax) & (amax != 0)
    return torch.where(usable, scale, torch.ones_like(scale))


def inverse_of(amax: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns scale_inv: 1 / scale, or infinity for an infinite amax, in the shape of ``scale``."""
    return torch.where(torch.isinf(amax), torch.inf, 1.0 / scale)
