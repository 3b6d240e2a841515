"""current_scale: bandwidth over the floor's bytes, against torch eager and torch.compile.

Bytes counted for an element of bf16: read 2 twice, write 1 for each layout: 6 for both, 5 for one.
What the second kernel finds in the L2 cache is not subtracted, so a figure may exceed a copy's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import harness
import torch

from apex_te.ops.current_scale import current_scale, tensor_amax

SHAPES = [(16384, 4096), (16384, 14336), (14336, 4096), (4096, 4096), (2048, 4096)]
E4M3 = torch.float8_e4m3fn


def plain(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The formula in PyTorch, both layouts."""
    amax = x.abs().max().float()
    scale = 448.0 / amax
    codes = (x.float() * scale).clamp(-448, 448).to(E4M3)
    return codes, codes.t().contiguous(), scale, 1.0 / scale


@harness.case("current_scale")
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
