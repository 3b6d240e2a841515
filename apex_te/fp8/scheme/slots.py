"""Slots: the views of a module's FP8 state over which a scheme with state builds quantizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch


class ScaleSharing(Protocol):
    """Protocol of an object that knows which ranks compute a state's scales together."""

    def over(self, group: Any) -> bool:
        """Returns True if all ranks of ``group`` have equal scales, and updates keep them equal."""

    def reduced_over(self, group: Any) -> bool:
        """Returns True if the next scales come from the amax values of all ranks of ``group``."""


class Slot(NamedTuple):
    """Named tuple of views, fp32 ``[1]``, of an FP8 state's entries for one tensor of a GEMM.

    ``amax`` is in row 0 of the history, which collects amax values until the next update.
    ``pending_scale`` is the scale that a pending update will give; None for gradients. ``number``
    counts the forward slots first, then the backward ones.
    """

    scale: torch.Tensor
    scale_inv: torch.Tensor
    amax: torch.Tensor
    pending_scale: torch.Tensor | None
    number: int


class GemmSlots(NamedTuple):
    """Named tuple of the slots of a GEMM's three quantized tensors in forward and backward."""

    input: Slot
    weight: Slot
    grad_output: Slot


@dataclass(frozen=True)
class Slots:
    """Views of a module's FP8 state, over which a scheme with state builds quantizers.

    ``first_due`` is True for slots whose first scale is still to be computed. ``first_on_device``
    has such flags, int32, for groups of rows, since only the device knows which are empty.
    """

    gemms: tuple[GemmSlots, ...]
    first_due: list[bool]
    first_on_device: dict[tuple[int, ...], torch.Tensor]
    sync: ScaleSharing
    update_scales: Callable[..., None]
