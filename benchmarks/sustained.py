"""Time and energy of a step under sustained load, for contenders that take turns in blocks.

A board at its power limit runs slower than a cool one, and who is measured second looks slower. So
all contenders first warm the board together, then run in blocks of steps back to back, in
alternating order. A block's first part, in which clocks settle, is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import harness
from power import PowerMeter, Span

_SETTLING = 0.25  # part of a block


class _Contender:
    """A step with what its blocks have measured."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.ms = 1.0  # of one step, roughly
        self.steps, self.elapsed_ms = 0, 0.0
        self.spans: list[Span] = []

    def run(self, steps: int) -> float:
        return harness.elapsed_us(lambda: [self.call() for _ in range(steps)]) / 1e3

    def block(self, seconds: float, counted: bool) -> None:
        settling = max(1, round(_SETTLING * seconds * 1e3 / self.ms))
        self.run(settling)
        steps = max(3, round((1 - _SETTLING) * seconds * 1e3 / self.ms))
        begin = time.perf_counter()
        elapsed = self.run(steps)
        self.ms = elapsed / steps
        if counted:
            self.spans.append(Span(begin, time.perf_counter()))
            self.steps += steps
            self.elapsed_ms += elapsed


def sustained(
    calls: dict[str, Callable[[], Any]],
    rounds: int = 3,
    block_s: float = 0.8,
    warmup_s: float = 2.0,
) -> dict[str, dict[str, Any]]:
    """Returns each step's ``ms sustained`` and, where NVML can be read, energy and clocks."""
    contenders = {name: _Contender(call) for name, call in calls.items()}
    for contender in contenders.values():
        contender.run(2)
        contender.ms = contender.run(3) / 3
    end = time.perf_counter() + warmup_s
    while time.perf_counter() < end:
        for contender in contenders.values():
            contender.block(min(0.2, warmup_s / 2), counted=False)
    with PowerMeter() as meter:
        for k in range(rounds):
            order = [*contenders.values()]
            for contender in order if k % 2 == 0 else reversed(order):
                contender.block(block_s, counted=True)
    found = {}
    for name, contender in contenders.items():
        milliseconds = contender.elapsed_ms / contender.steps
        row = {"ms sustained": milliseconds, **meter.figures(contender.spans)}
        if "W" in row:
            row["J"] = row["W"] * milliseconds / 1e3
        found[name] = row
    return found
