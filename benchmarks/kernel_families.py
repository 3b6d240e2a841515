"""GPU time of a step by families of kernels, from CUPTI inside a loop that keeps the board warm."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

WARM_STEPS, STEPS = 40, 5
# The first that fits a kernel's name; cuDNN's attention has "sdpa" in it.
FAMILIES = {
    "attention": re.compile(r"sdpa|fmha|flash|attention|softmax_lse|dot_do_o|convert_dq", re.I),
    "products": re.compile(
        r"gemm|nvjet|xmma|cutlass|wgmma|splitk|cublas|gradient_kernel<apex_te::Variant", re.I
    ),
}
REST = "rest"


def family(kernel: str) -> str:
    """Returns the family of a kernel's name: ``"attention"``, ``"products"`` or ``"rest"``."""
    return next((name for name, fits in FAMILIES.items() if fits.search(kernel)), REST)


def by_family(durations: dict[str, float]) -> dict[str, float]:
    """Returns the sums of kernels' times by family; the argument has them by kernel name."""
    sums = dict.fromkeys((*FAMILIES, REST), 0.0)
    for kernel, time in durations.items():
        sums[family(kernel)] += time
    return sums


def is_on(event: Any, device: DeviceType) -> bool:
    """Returns True if an event of the profiler ran on ``device``."""
    return event.device_type == device  # not "is": each event has an object of its own


def kernel_ms(call: Callable[[], Any]) -> dict[str, float]:
    """Returns a step's GPU milliseconds by kernel name, after ``WARM_STEPS`` with CUPTI on."""
    sums: dict[str, float] = {}

    def add(profiled: Any) -> None:
        for event in profiled.key_averages():
            # a named range of kernels is listed beside them
            named = getattr(event, "is_user_annotation", False)
            is_range = named or event.key.startswith("ProfilerStep")
            if is_on(event, DeviceType.CUDA) and not is_range:
                sums[event.key] = sums.get(event.key, 0.0) + event.device_time_total

    steps = schedule(wait=0, warmup=WARM_STEPS, active=STEPS, repeat=1)
    with profile(activities=[ProfilerActivity.CUDA], schedule=steps, on_trace_ready=add) as run:
        for k in range(WARM_STEPS + STEPS):
            call()
            if k + 1 in (WARM_STEPS, WARM_STEPS + STEPS):
                torch.cuda.synchronize()  # kernels of other steps must not run among these
            run.step()
    return {kernel: total / STEPS / 1e3 for kernel, total in sums.items()}
