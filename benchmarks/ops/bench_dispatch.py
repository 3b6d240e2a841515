"""Host cost of a dispatcher call with three tensors, and with its launch, against torch.add(out=).

The call without a launch ends at a set noop flag on the CPU: all conversions, checks and the C call
are in it, no work is.
"""

from __future__ import annotations

from collections.abc import Iterator

import harness
import torch

from apex_te.runtime import function


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
