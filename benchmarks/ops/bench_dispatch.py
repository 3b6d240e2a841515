"""Host cost of a dispatcher call with three tensors, and with its launch, against torch.add(out=).

The call without a launch ends at a set noop flag on the CPU: all conversions, checks and the C call
are in it, no work is.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

from apex_te.runtime import function


def main() -> None:
    call = function("cast_transpose", "cast_transpose")
    rows = []
    x, one = torch.randn(1, 1).bfloat16(), torch.ones(1)
    flag = torch.ones(1, dtype=torch.int32)

    def noop():
        call(x, one, None, None, None, None, None, None, flag)

    def nothing():
        pass

    empty = harness.host_us(nothing, calls=20000)
    rows.append({"call": "3 tensors, no work (cpu)", "us": harness.host_us(noop, 20000) - empty})
    out = torch.empty(1)
    rows.append(
        {
            "call": "torch.add(out=) (cpu)",
            "us": harness.host_us(lambda: torch.add(one, one, out=out), 20000) - empty,
        }
    )
    if torch.cuda.is_available():
        gx = torch.randn(16, 16, device="cuda").bfloat16()
        gone, gout = torch.ones(1, device="cuda"), torch.empty(16, 16, device="cuda")
        codes = torch.empty(16, 16, dtype=torch.float8_e4m3fn, device="cuda")
        other = torch.randn(16, 16, device="cuda")

        def cast():
            call(gx, gone, codes, None, None, None, None, None, None)

        def add():
            torch.add(other, other, out=gout)

        # The launch queue holds about 1,000: shorter rounds measure the host alone.
        rows.append(
            {"call": "cast_transpose with launch (cuda)", "us": harness.host_us(cast, 500, 21)}
        )
        rows.append({"call": "torch.add(out=) (cuda)", "us": harness.host_us(add, 500, 21)})
    harness.report("dispatch", rows)


if __name__ == "__main__":
    main()
