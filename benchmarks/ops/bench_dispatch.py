"""Host cost of a dispatcher call with three tensors, and with its launch, against torch.add(out=).

The call without a launch ends at a set noop flag on the CPU: all conversions, checks and the C call
are in it, no work is.

``amax_scale_update``: 256 histories of 1024 steps, one launch; GPU time and host time of a call, of
plain lists and of prepared ones, which the update of all modules uses. Every slot is staged anew
before each timed call: a slot without a staged amax is not rolled and would cost less. Bytes are
1 MiB read and 1 MiB written, so latency is what counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import harness
import torch

from apex_te.ops.amax_scale_update import amax_scale_update
from apex_te.runtime import function, tensor_list


@harness.case("dispatch")
def rows() -> Iterator[harness.Row]:
    call = function("cast_transpose", "cast_transpose")
    x, one, out = torch.randn(1, 1).bfloat16(), torch.ones(1), torch.empty(1)
    flag, none = torch.ones(1, dtype=torch.int32), [None] * 5
    empty = harness.host_us(lambda: None, calls=20000)
    us = harness.host_us(lambda: call(x, one, None, *none, flag), 20000)
    yield {"call": "3 tensors, no work (cpu)", "us": us - empty}
    us = harness.host_us(lambda: torch.add(one, one, out=out), 20000)
    yield {"call": "torch.add(out=) (cpu)", "us": us - empty}
    if torch.cuda.is_available():
        x, other, out = (torch.randn(16, 16, device="cuda") for _ in range(3))
        x, one = x.bfloat16(), torch.ones(1, device="cuda")
        codes = torch.empty(16, 16, dtype=torch.float8_e4m3fn, device="cuda")
        calls = {
            "cast_transpose with launch": lambda: call(x, one, codes, *none, None),
            "torch.add(out=)": lambda: torch.add(other, other, out=out),
        }
        for name, launch in calls.items():
            # The launch queue holds about 1,000: shorter rounds measure the host alone.
            yield {"call": f"{name} (cuda)", "us": harness.host_us(launch, 500, 21)}


@harness.case("amax_scale_update")
def update_rows() -> Iterator[harness.Row]:
    for count, length, slots in ((256, 1024, 1), (256, 1024, 3), (1000, 16, 3)):
        table = torch.rand(count, length, slots, device="cuda")
        staged = table[:, 0]
        scales = torch.ones(count, slots, device="cuda")
        inverses = torch.ones(count, slots, device="cuda")
        lists = list(table), list(scales), list(inverses)
        prepared = tuple(map(tensor_list, lists))
        limits = [448.0] * count
        for algo in ("max", "most_recent"):
            update = partial(amax_scale_update, *prepared, limits, algo=algo)
            plain = partial(amax_scale_update, *lists, limits, algo=algo)
            update()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                update()
            scales.zero_()
            staged.fill_(2.0)
            graph.replay()
            if not (scales > 0).all():
                raise RuntimeError("amax_scale_update: the timed graph left scales untouched")
            yield {
                "histories": count,
                "length x slots": f"{length}x{slots}",
                "algo": algo,
                **harness.kernel_us(graph.replay, prepare=partial(staged.fill_, 2.0)),
                "host us": harness.host_us(plain, 100),
                "host us, prepared": harness.host_us(update, 100),
            }
