"""row_quantize: bandwidth over the floor's bytes, against torch eager and torch.compile.

Floor in bytes an element of bf16: read 2, write 1 for each layout, and a scale for each row of it.
The kernels read x twice for the rowwise copy (the second time from a cache) and twice for the
columnwise one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import harness
import torch

from apex_te.ops.row_quantize import row_quantize

SHAPES = [(16384, 4096), (16384, 14336), (4096, 4096), (16384, 3584)]
E4M3 = torch.float8_e4m3fn


def plain(x: torch.Tensor) -> list[torch.Tensor]:
    """The formula in PyTorch, both layouts."""
    out = []
    for t in (x, x.t()):
        scale_inv = t.abs().amax(1, keepdim=True).float() / 448.0
        out += [(t.float() / scale_inv).clamp(-448, 448).to(E4M3).contiguous(), scale_inv]
    return out


@harness.case("row_quantize")
def rows() -> Iterator[harness.Row]:
    for shape in SHAPES:
        x = harness.normal(*shape)
        scale = torch.rand(shape[1], device=x.device)
        for layout, options in harness.LAYOUTS.items():
            out = row_quantize(x, E4M3, **options)
            cast = functools.partial(row_quantize, x, E4M3, out=out, **options)
            compared = shape == SHAPES[0] and layout == "both"
            peers = harness.formula_peers(plain, x) if compared else {}
            scales = 4 * (shape[0] * options["rowwise"] + shape[1] * options["columnwise"])
            num_bytes = x.numel() * (2 + sum(options.values())) + scales
            yield harness.measure(f"row_quantize {layout}", shape, num_bytes, cast, peers)
            if layout == "rowwise":
                scaled = functools.partial(cast, column_scale=scale)
                yield harness.measure("row_quantize of scaled columns", shape, num_bytes, scaled)
