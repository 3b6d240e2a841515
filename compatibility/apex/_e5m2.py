"""Copies of weights for apex's distributed optimizers: in any dtype, E5M2 as uint8 included."""

from __future__ import annotations

import torch


def cast(source: torch.Tensor, out: torch.Tensor) -> None:
    """Copies ``source`` to ``out``; uint8 on either side is E5M2, the high byte of a float16.

    E5M2 is rounded to nearest, ties away from zero, as apex rounds it.
    """
    if source.dtype is torch.uint8:
        source = source.view(torch.float8_e5m2).to(torch.float32)
    if out.dtype is not torch.uint8:
        out.copy_(source)
        return
    wide = source.float()
    power = (wide.contiguous().view(torch.int32) & -0x800000).view(torch.float32)  # of 2, or 0
    half = (wide + power / 8).to(torch.float16)
    out.copy_((half.view(torch.int16) >> 8).to(torch.uint8))


def is_off(flag: torch.Tensor) -> torch.Tensor:
    """Returns whether an overflow flag, which may have no element, is 0: a bool tensor ``[]``."""
    return (flag == 0).all()
