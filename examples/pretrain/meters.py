"""Losses and times of steps, read without holding the device up; joules; the share of its peak."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

import torch

AHEAD = 2  # steps that the host may be ahead of the device
# Dense bf16 operations a second, by a part of the device's name.
PEAKS = {"H200": 989.4e12, "H100 PCIe": 756e12, "H100": 989.4e12, "A100": 312e12, "B200": 2250e12}


class Reading(NamedTuple):
    """Figures of one step.

    Attributes:
        step: from 1.
        loss, grad_norm: as the device computed them.
        ms: from the step's begin to its end on the device.
    """

    step: int
    loss: float
    grad_norm: float
    ms: float


class Meter:
    """Reads the loss and the time of steps a little later than they were computed."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self._pending: deque[tuple[int, torch.Tensor, Any, Any]] = deque()
        self._begin: Any = None

    def begin(self) -> None:
        """Notes that a step begins."""
        self._begin = self._now()

    def end(self, step: int, loss: torch.Tensor, norm: torch.Tensor) -> None:
        """Notes that a step has been issued; ``loss`` and ``norm`` are scalars on the device."""
        values = torch.stack([loss.float(), norm.float()])
        if self.is_cuda:
            values = values.to("cpu", non_blocking=True)
        self._pending.append((step, values, self._begin, self._now()))

    def readings(self, wait: bool = False) -> list[Reading]:
        """Returns what the device has computed since the last call, oldest first.

        Args:
            wait: return all steps; else wait only if the host is more than ``AHEAD`` steps ahead.
        """
        found = []
        while self._pending:
            step, values, begin, end = self._pending[0]
            if self.is_cuda and not end.query():
                if not wait and len(self._pending) <= AHEAD:
                    break
                end.synchronize()
            self._pending.popleft()
            ms = begin.elapsed_time(end) if self.is_cuda else (end - begin) * 1e3
            loss, norm = values.tolist()
            found.append(Reading(step, loss, norm, ms))
        return found

    def _now(self) -> Any:
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Energy:
    """Joules that the GPU takes, from NVML's counter; None where it cannot be read."""

    def __init__(self, device: torch.device) -> None:
        self._read: Any = None
        if device.type == "cuda":
            try:
                import pynvml

                pynvml.nvmlInit()
                uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
                handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
                pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
            except Exception:  # no package, no library, no such counter
                return
            self._read = lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
            self._last = self._read()

    def joules(self) -> float | None:
        """Returns the joules since the last call."""
        if self._read is None:
            return None
        before, self._last = self._last, self._read()
        return self._last - before


def peak_flops(device: torch.device) -> float | None:
    """Returns the device's bf16 operations a second; None if they are not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)
