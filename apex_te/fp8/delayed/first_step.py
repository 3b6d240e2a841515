"""Slots whose first scale is still to be computed from data, with ``first_step="current"``."""

from __future__ import annotations

import torch


class FirstSteps:
    """Flags of the slots of one FP8 state whose first scale is due (not computed yet).

    A slot is due while its flag in ``due`` is True, and its int32 flag in ``on_device``, if any, is
    not 0. Only the device knows whether groups of rows are empty. ``on_device`` has tensors of
    flags by tuples of slots.
    """

    __slots__ = ("due", "on_device")

    due: list[bool]
    on_device: dict[tuple[int, ...], torch.Tensor]

    def __init__(self, slots: int) -> None:
        self.begin(slots)

    def begin(self, slots: int) -> None:
        """Makes all ``slots`` slots due, with a new list ``due`` and no flags on the device."""
        self.due = [True] * slots
        self.on_device = {}

    def still_due(self) -> list[bool]:
        """Returns a bool per slot, True if its first scale is missing; waits for the device."""
        due = list(self.due)
        for slots, flags in self.on_device.items():
            if any(due[slot] for slot in slots):
                for slot, flag in zip(slots, flags.tolist(), strict=True):
                    due[slot] = due[slot] and flag != 0
        return due

    def set(self, due: list[bool]) -> None:
        """Sets which slots are due; flags on the device keep their addresses."""
        self.due[:] = due
        with torch.inference_mode(False), torch.no_grad():
            for slots, flags in self.on_device.items():
                flags.copy_(torch.tensor([due[slot] for slot in slots], dtype=torch.int32))

    def end(self) -> None:
        """Marks the first scales of all slots as set, on the host."""
        if True in self.due:
            self.due[:] = [False] * len(self.due)

    def move(self, device: torch.device) -> None:
        """Moves the flags to ``device``."""
        for slots, flags in self.on_device.items():
            self.on_device[slots] = flags.to(device, copy=True)
