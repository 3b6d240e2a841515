"""Slots whose first scale ``first_step="current"`` has still to set, on the host and the device."""

from __future__ import annotations

import torch

__all__ = ["FirstSteps"]


class FirstSteps:
    """Knows the slots of one FP8 state whose first scale is due.

    Attributes:
        due: a bool per slot, True while its first scale is due as far as the host knows.
        on_device: int32 flags ``[slots]`` of a tuple of slots, for groups of rows of which only the
            device knows whether there are any; such a slot is due while both are true.
    """

    __slots__ = ("due", "on_device")

    due: list[bool]
    on_device: dict[tuple[int, ...], torch.Tensor]

    def __init__(self, slots: int) -> None:
        self.begin(slots)

    def begin(self, slots: int) -> None:
        """Makes every slot due, in new objects."""
        self.due = [True] * slots
        self.on_device = {}

    def still_due(self) -> list[bool]:
        """Returns a bool per slot; waits for the device where its flags decide."""
        due = list(self.due)
        for slots, flags in self.on_device.items():
            if any(due[slot] for slot in slots):
                for slot, flag in zip(slots, flags.tolist(), strict=True):
                    due[slot] = due[slot] and flag != 0
        return due

    def set(self, due: list[bool]) -> None:
        """Sets host and device from a bool per slot; the device's flags keep their addresses."""
        self.due[:] = due
        with torch.inference_mode(False), torch.no_grad():
            for slots, flags in self.on_device.items():
                flags.copy_(torch.tensor([due[slot] for slot in slots], dtype=torch.int32))

    def end(self) -> None:
        """Notes on the host that every slot has its first scale."""
        self.due[:] = [False] * len(self.due)

    def move(self, device: torch.device) -> None:
        """Copies the flags to ``device``."""
        for slots, flags in self.on_device.items():
            self.on_device[slots] = flags.to(device, copy=True)
