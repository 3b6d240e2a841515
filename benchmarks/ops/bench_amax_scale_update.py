"""amax_scale_update: 256 histories of 1024 steps, one launch; GPU time and host time of a call.

Host times are of plain lists and of prepared ones, which the update of all modules uses.

Every slot is staged anew before each timed call: a slot without a staged amax is not rolled and
would cost less. Bytes are 1 MiB read and 1 MiB written, so latency is what counts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import harness
import torch

from apex_te.ops.amax_scale_update import amax_scale_update
from apex_te.runtime import tensor_list


@harness.case("amax_scale_update")
def rows() -> Iterator[harness.Row]:
    for count, length, slots in ((256, 1024, 1), (256, 1024, 3), (1000, 16, 3)):
        table = torch.rand(count, length, slots, device="cuda")
        staged = table[:, 0]
        scales = torch.ones(count, slots, device="cuda")
        inverses = torch.ones(count, slots, device="cuda")
        lists = list(table), list(scales), list(inverses)
        prepared = tuple(map(tensor_list, lists))
        limits = [448.0] * count
        for algo in ("max", "most_recent"):
            update = functools.partial(amax_scale_update, *prepared, limits, algo=algo)
            plain = functools.partial(amax_scale_update, *lists, limits, algo=algo)
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
                **harness.kernel_us(graph.replay, prepare=functools.partial(staged.fill_, 2.0)),
                "host us": harness.host_us(plain, 100),
                "host us, prepared": harness.host_us(update, 100),
            }
