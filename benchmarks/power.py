"""Energy, power, SM clock and throttle reasons of the GPU while work runs, read from NVML.

A thread reads the counters every 20 ms through ctypes, without another package. Where NVML or one
of its counters is missing, so are the figures that need it.
"""

from __future__ import annotations

import ctypes
import itertools
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

INTERVAL_S = 0.02
# Bits of nvmlDeviceGetCurrentClocksThrottleReasons.
REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
    0x100: "display clocks",
}
_SM_CLOCK = 1  # NVML_CLOCK_SM


class Sample(NamedTuple):
    """Readings of NVML at one moment; None for what NVML does not know."""

    time: float  # of time.perf_counter
    joules: float | None  # since the driver was loaded
    watts: float | None  # an average over up to a second
    mhz: int | None  # SM clock
    reasons: int | None  # bits of REASONS


class Span(NamedTuple):
    """A time, in seconds of ``time.perf_counter()``."""

    begin: float
    end: float


class Nvml:
    """NVML's counters of the current CUDA device; raises ``OSError`` without NVML or device."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        if self._library.nvmlInit_v2() != 0:
            raise OSError("nvmlInit_v2 failed")
        self._device = ctypes.c_void_p()
        device = ctypes.byref(self._device)
        uuid = f"GPU-{torch.cuda.get_device_properties().uuid}".encode()
        index = torch.cuda.current_device()
        if self._library.nvmlDeviceGetHandleByUUID(uuid, device) != 0 and (
            self._library.nvmlDeviceGetHandleByIndex_v2(index, device) != 0
        ):
            raise OSError("NVML does not know the current CUDA device")

    def sample(self) -> Sample:
        now = time.perf_counter()
        millijoules = self._read(ctypes.c_ulonglong, "nvmlDeviceGetTotalEnergyConsumption")
        milliwatts = self._read(ctypes.c_uint, "nvmlDeviceGetPowerUsage")
        joules, watts = (None if n is None else n / 1e3 for n in (millijoules, milliwatts))
        mhz = self._read(ctypes.c_uint, "nvmlDeviceGetClockInfo", _SM_CLOCK)
        name, former = (
            f"nvmlDeviceGetCurrentClocks{kind}Reasons" for kind in ("Event", "Throttle")
        )
        reasons = self._read(ctypes.c_ulonglong, name, former=former)
        return Sample(now, joules, watts, mhz, reasons)

    def _read(self, kind: Any, name: str, *arguments: int, former: str = "") -> int | None:
        """Returns a counter of type ``kind``, or None; ``former`` is an older name of it."""
        function = getattr(self._library, name, None) or getattr(self._library, former, None)
        value = kind()
        if function is None or function(self._device, *arguments, ctypes.byref(value)) != 0:
            return None
        return int(value.value)


class PowerMeter:
    """Context in which a thread samples the counters; ``figures`` reads them for spans of time.

    ``read`` is by default NVML's of the current CUDA device; without NVML nothing is measured.
    """

    def __init__(self, read: Callable[[], Sample] | None = None) -> None:
        self.samples: list[Sample] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        try:
            self._read = read or Nvml().sample
        except (OSError, AttributeError, RuntimeError, AssertionError) as error:
            print(f"power: not measured: {error}")
            self._stop.set()

    def __enter__(self) -> PowerMeter:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self.samples.append(self._read())

    def figures(self, spans: Iterable[Span]) -> dict[str, Any]:
        """Returns mean watts, median SM clock and throttle reasons over some spans of time."""
        return figures([[s for s in self.samples if a <= s.time <= b] for a, b in spans])


def figures(spans: list[list[Sample]]) -> dict[str, Any]:
    """Returns the figures of samples, a list for each span; those without readings are absent."""
    found: dict[str, Any] = {}
    flat = [sample for span in spans for sample in span]
    if (watts := mean_watts(spans)) is not None:
        found["W"] = watts
    clocks = [sample.mhz for sample in flat if sample.mhz is not None]
    if clocks:
        found["SM MHz"] = int(statistics.median(clocks))
    told = [sample.reasons for sample in flat if sample.reasons is not None]
    if told:
        shares = Counter(name for r in told for bit, name in REASONS.items() if r & bit)
        parts = [f"{name} {n / len(told):.0%}" for name, n in shares.most_common()]
        found["throttle"] = ", ".join(parts) or "none"
    return found


def mean_watts(spans: list[list[Sample]]) -> float | None:
    """Returns mean power over spans, from the energy counter if it has moved in one of them.

    The counter moves only now and then, so a span counts from the first move in it to the last;
    where it never moved twice, or is missing, the mean of the samples' power is returned.
    """
    joules = seconds = 0.0
    for span in spans:
        moves = [
            (after.time, after.joules)
            for before, after in itertools.pairwise(span)
            if after.joules is not None and before.joules is not None
            and after.joules != before.joules
        ]  # fmt: skip
        if len(moves) > 1:
            joules += moves[-1][1] - moves[0][1]
            seconds += moves[-1][0] - moves[0][0]
    if seconds > 0:
        return joules / seconds
    watts = [sample.watts for span in spans for sample in span if sample.watts is not None]
    return statistics.mean(watts) if watts else None
