"""Which slots of an FP8 state ``first_step="current"`` has still to set, on host and device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .state import FP8State

__all__ = ["set_first_due", "still_due"]


def still_due(state: FP8State) -> list[bool]:
    """Per slot, whether its first step is due; waits for the device where that decides."""
    due = list(state.first_due)
    for slots, flags in state.first_on_device.items():
        if any(due[slot] for slot in slots):
            for slot, flag in zip(slots, flags.tolist(), strict=True):
                due[slot] = due[slot] and flag != 0
    return due


def set_first_due(state: FP8State, due: list[bool]) -> None:
    """Say whose first step is due; the flags on the device keep their addresses."""
    state.first_due[:] = due
    with torch.inference_mode(False), torch.no_grad():
        for slots, flags in state.first_on_device.items():
            flags.copy_(torch.tensor([due[slot] for slot in slots], dtype=torch.int32))
