"""amax_scale_update: 256 histories of 1024 steps, one launch; GPU time and host time of a call.

Bytes are 2 MiB read and 2 MiB written, so the floor is a launch: latency is what counts.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

from apex_te.ops.amax_scale_update import amax_scale_update


def main() -> None:
    rows = []
    for count, length, slots in ((256, 1024, 1), (256, 1024, 3), (1000, 16, 3)):
        histories = [torch.rand(length, slots, device="cuda") for _ in range(count)]
        scales = [torch.ones(slots, device="cuda") for _ in range(count)]
        inverses = [torch.ones(slots, device="cuda") for _ in range(count)]
        limits = [448.0] * count
        for algo in ("max", "most_recent"):

            def call(
                histories=histories, scales=scales, inverses=inverses, limits=limits, algo=algo
            ):
                for history in histories[:1]:
                    history[0].fill_(1.0)
                amax_scale_update(histories, scales, inverses, limits, algo=algo)

            graph = torch.cuda.CUDAGraph()
            call()
            with torch.cuda.graph(graph):
                amax_scale_update(histories, scales, inverses, limits, algo=algo)
            rows.append(
                {
                    "histories": count,
                    "length x slots": f"{length}x{slots}",
                    "algo": algo,
                    **harness.kernel_us(graph.replay),
                    "host us": harness.host_us(call, 100),
                }
            )
    harness.report("amax_scale_update", rows)


if __name__ == "__main__":
    main()
