"""current_scale: bandwidth over the floor's bytes, against torch eager and torch.compile.

Bytes counted for an element of bf16: read 2 twice, write 1 for each layout: 6 for both, 5 for one.
What the second kernel finds in the L2 cache is not subtracted, so a figure may exceed a copy's.

What was tried on an H200, both layouts, TB/s at 16384x4096 and at 4096x4096 (32 MB: fits in L2),
against 3.76 and 3.43: the second kernel in the order of the first (3.70, 3.31), started when the
first ends (3.74, 3.31) or by an ordinary launch (3.68, 3.14); tiles of 128x128 (3.70, 3.25); 8
loads a thread for the amax (3.75, 3.39), with half the blocks (3.80, 3.38).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

from apex_te.ops.current_scale import current_scale, tensor_amax

SHAPES = [(16384, 4096), (16384, 14336), (14336, 4096), (4096, 4096), (2048, 4096)]
E4M3 = torch.float8_e4m3fn


def plain(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The formula in PyTorch, both layouts."""
    amax = x.abs().max().float()
    scale = 448.0 / amax
    codes = (x.float() * scale).clamp(-448, 448).to(E4M3)
    return codes, codes.t().contiguous(), scale, 1.0 / scale


def rows() -> Iterator[harness.Row]:
    for shape in SHAPES:
        x = harness.normal(*shape)
        n, amax = x.numel(), tensor_amax(x)
        for layout, copies, outputs in harness.layouts(x, E4M3):
            compared = shape == SHAPES[0] and layout == "both"
            peers = harness.formula_peers(plain, x) if compared else {}
            cast = functools.partial(current_scale, x, E4M3, **outputs)
            given = functools.partial(cast, amax=amax)
            function = f"current_scale {layout}"
            yield harness.measure(function, shape, n * (4 + copies), cast, peers)
            yield harness.measure(f"{function}, amax given", shape, n * (2 + copies), given)
        yield harness.measure("tensor_amax", shape, 2 * n, functools.partial(tensor_amax, x))
    x = harness.normal(64, 4096)
    yield harness.in_graph("current_scale both", lambda: current_scale(x, E4M3))
    yield harness.in_graph(
        "current_scale rowwise", lambda: current_scale(x, E4M3, columnwise=False)
    )


if __name__ == "__main__":
    harness.run("current_scale", rows())
