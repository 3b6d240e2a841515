"""MXFP4 weights of a checkpoint (gpt-oss) as E4M3, and groups of 32 as blocks of 128x128."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from .description import BLOCK

GROUP = 32
# E4M3 codes of the 16 values: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and their negatives.
_CODES = (0x00, 0x30, 0x38, 0x3C, 0x40, 0x44, 0x48, 0x4C)
_LARGEST = math.frexp(448.0)  # of E4M3


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    """Returns the E4M3 codes ``[.., groups * 32]`` of bytes ``[.., groups, 16]``.

    The lower half of a byte comes first. Source: transformers' ``integrations/mxfp4.py``.
    """
    codes = torch.tensor([*_CODES, *(0x80 | code for code in _CODES)], dtype=torch.uint8)
    codes = codes.to(packed.device)
    pairs = torch.stack([packed & 0x0F, packed >> 4], -1).flatten(-3)
    return codes[pairs.int()].view(torch.float8_e4m3fn)


def in_blocks(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Converts the scales of a matrix from 32 elements of a row to blocks of 128x128.

    Args:
        codes: E4M3 ``[rows, cols]``.
        scale: float32 ``[rows, ceil(cols / 32)]``, powers of two, or NaN as E8M0 has it.

    Returns:
        codes: E4M3 ``[rows, cols]``.
        scale_inv: float32 ``[ceil(rows / 128), ceil(cols / 128)]``, powers of two.
        changed: number of values that FP8 cannot represent with these scales, NaN included; 0 for
            MXFP4 if the exponents within a block differ by at most 14, and for MXFP8 if the block's
            smaller values lose no bits.
    """
    rows, cols = codes.shape
    down, across = -(-rows // BLOCK), -(-cols // BLOCK)
    pad = (0, across * BLOCK - cols, 0, down * BLOCK - rows)
    unknown = scale.isnan().repeat_interleave(GROUP, 1)[:, :cols]
    known = codes.float().masked_fill(unknown, math.nan)
    values = functional.pad(known, pad)
    exponents = torch.frexp(scale)[1] - 1
    exponents = functional.pad(exponents, (0, across * (BLOCK // GROUP) - scale.shape[1]))
    exponents = functional.pad(exponents, (0, 0, 0, down * BLOCK - rows))
    # The least exponent with which E4M3 holds a group; one of zeros needs no scale.
    fraction, exponent = torch.frexp(values.view(down * BLOCK, -1, GROUP).abs().amax(-1))
    own = exponents + exponent + (fraction > _LARGEST[0]).int() - _LARGEST[1]
    least = torch.iinfo(torch.int32).min
    used = own.masked_fill(fraction == 0, least).view(down, BLOCK, across, BLOCK // GROUP)
    largest = used.amax((1, 3))
    block = torch.where(largest == least, 0, largest).clamp(min=-126)
    shift = exponents - block.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK // GROUP, 1)
    values = torch.ldexp(values, shift.repeat_interleave(GROUP, 1))[:rows, :cols]
    made = values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    changed = int((made.float() != values).sum())
    return made, torch.ldexp(torch.ones_like(block, dtype=torch.float32), block), changed
