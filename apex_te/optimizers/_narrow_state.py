"""Optimizer state in fewer bits than float32: rounded, scaled, or the rest of numbers' bits.

An op updates float32 numbers, or bfloat16 parameters with the rest of their bits. Each class here
gives it float32 copies of a list of other tensors, and stores them again afterwards. Storing what
was not changed leaves the numbers as they are, so that a step that is skipped on the device, and
training resumed from saved float32 numbers, are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..ops import multi_tensor

# Exponent of the power of two that stored magnitudes do not exceed, by dtype.
SCALED = {torch.float16: 15, torch.float8_e4m3fn: 8}


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which state is stored; torch.uint8 stands for FP8 in options."""
    return torch.float8_e4m3fn if dtype is torch.uint8 else dtype


class StateList:
    """Prepared list of float32 tensors, which an op updates where they lie."""

    is_wide = True  # the stored tensors are float32, so that ``wide`` makes no copies

    def __init__(self, tensors: Any) -> None:
        self.tensors = tensors

    def wide(self) -> Any:
        """Returns the numbers in float32, a list for an op to update."""
        return self.tensors

    def store(self, wide: Any) -> None:
        """Stores the numbers in ``wide``, a result of ``wide()``, which it may overwrite."""


class Stored(StateList):
    """List of tensors that are stored in another dtype than float32."""

    is_wide = False


class Rounded(Stored):
    """List of bfloat16 tensors, to which float32 numbers are rounded."""

    def wide(self) -> Any:
        pieces = _pieces(self.tensors)
        multi_tensor.scale(self.tensors, pieces, 1.0)
        return pieces

    def store(self, wide: Any) -> None:
        multi_tensor.scale(wide, self.tensors, 1.0)


class Scaled(Stored):
    """List of float16 or FP8 tensors; the numbers are these times ``scales``, powers of two."""

    def __init__(self, tensors: Any, scales: Sequence[torch.Tensor]) -> None:
        super().__init__(tensors)
        self.scales = scales

    def wide(self) -> Any:
        pieces = _pieces(self.tensors)
        for piece, stored, scale in zip(pieces, self.tensors, self.scales, strict=True):
            unscaled(stored, scale, piece)
        return pieces

    def store(self, wide: Any) -> None:
        shift = SCALED[self.tensors[0].dtype]
        # The exponent of the least power of two that is not below the amax.
        bits = multi_tensor.amax(wide).view(torch.int32)
        exponents = (bits >> 23) + ((bits & 0x7FFFFF) != 0) - shift
        exponents = exponents.clamp(1, 253).to(torch.int32)  # that have a reciprocal
        scales = (exponents << 23).view(torch.float32).unbind()
        inverses = ((254 - exponents) << 23).view(torch.float32).unbind()
        for i, (piece, stored) in enumerate(zip(wide, self.tensors, strict=True)):
            self.scales[i].copy_(scales[i])
            stored.copy_(piece.mul_(inverses[i]))


def _pieces(like: Any) -> list[torch.Tensor]:
    """Returns float32 zeros in the shapes of ``like``, parts of one tensor, aligned to 16 bytes."""
    sizes = [-(-t.numel() // 4) * 4 for t in like]
    flat = torch.zeros(sum(sizes), dtype=torch.float32, device=like[0].device)
    parts = zip(flat.split(sizes), like, strict=True)
    return [piece[: t.numel()].view(t.shape) for piece, t in parts]


def state_list(tensors: Any, scales: Sequence[torch.Tensor] | None) -> StateList:
    """Returns the list that serves the tensors' dtype; ``scales`` is None outside ``SCALED``."""
    dtype = tensors[0].dtype
    if dtype is torch.float32:
        return StateList(tensors)
    if scales is None:
        return Rounded(tensors)
    return Scaled(tensors, scales)


def unscaled(
    stored: torch.Tensor, scale: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the numbers of a scaled tensor in float32, exactly, in ``out`` if given."""
    out = torch.empty_like(stored, dtype=torch.float32) if out is None else out
    return out.copy_(stored).mul_(scale)


def scaled(number: torch.Tensor, stored: torch.Tensor, scale: torch.Tensor) -> None:
    """Stores float32 numbers in a float16 or FP8 tensor, and writes its scale."""
    Scaled([stored], [scale]).store([number.to(torch.float32, copy=True).contiguous()])


def master_of_halves(param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Returns the float32 number whose halves a bfloat16 and an int16 tensor hold."""
    high = param.detach().view(torch.int16).to(torch.int32)
    return ((high << 16) + remainder.to(torch.int32)).view(torch.float32)


def remainder_of(owner: str, param: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """Returns the int16 remainder of a float32 master weight whose rounded value is ``param``.

    A master weight halfway between two bfloat16 numbers, rounded down, moves by one bit.
    """
    high = param.detach().view(torch.int16).to(torch.int32)
    low = master.contiguous().view(torch.int32).to(torch.int64) - (high.to(torch.int64) << 16)
    if bool(((low < -0x8000) | (low > 0x8000)).any()):
        raise ValueError(
            f"{owner}: master_param must round to its parameter with store_param_remainders=True; "
            "load the model's weights first, got a master weight of another value"
        )
    return low.clamp_(-0x8000, 0x7FFF).to(torch.int16)
