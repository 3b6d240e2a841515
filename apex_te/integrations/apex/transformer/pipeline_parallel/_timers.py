"""Timers of a training step's parts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from .._print import print_last


class _Timer:
    """Stopwatch that waits for the GPU when it starts and stops."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._total = 0.0
        self._begun: float | None = None

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.time()

    def start(self) -> None:
        """Starts; raises RuntimeError if it runs."""
        if self._begun is not None:
            raise RuntimeError(f"timer {self.name} is already running")
        self._begun = self._now()

    def stop(self) -> None:
        """Stops; raises RuntimeError unless it runs."""
        if self._begun is None:
            raise RuntimeError(f"timer {self.name} is not running")
        self._total += self._now() - self._begun
        self._begun = None

    def reset(self) -> None:
        """Sets the time to zero."""
        self._total, self._begun = 0.0, None

    def elapsed(self, reset: bool = True) -> float:
        """Returns the seconds so far; it runs on if it runs."""
        is_running = self._begun is not None
        if is_running:
            self.stop()
        total = self._total
        if reset:
            self.reset()
        if is_running:
            self.start()
        return total


class Timers:
    """Timers by name."""

    def __init__(self) -> None:
        self.timers: dict[str, _Timer] = {}

    def __call__(self, name: str) -> _Timer:
        return self.timers.setdefault(name, _Timer(name))

    def write(
        self,
        names: Sequence[str],
        writer: Any,
        iteration: int,
        normalizer: float = 1.0,
        reset: bool = False,
    ) -> None:
        """Adds the times of some timers to a TensorBoard writer."""
        for name in names:
            value = self(name).elapsed(reset) / normalizer
            writer.add_scalar(f"{name}-time", value, iteration)

    def log(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> None:
        """Prints the milliseconds of some timers on the last rank."""
        times = (f"{name}: {self(name).elapsed(reset) * 1000 / normalizer:.2f}" for name in names)
        print_last("time (ms) | " + " | ".join(times))
