"""block_quantize: bandwidth over the floor's bytes, against torch eager and torch.compile.

Floor in bytes an element of bf16: read 2, write 1 for each layout; with 1x128 blocks 4 more for
128 elements of each layout. Dequantize to bf16: read 1 and the scales, write 2.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import harness
import torch

from apex_te.ops.block_quantize import block_dequantize, block_quantize

SHAPES = [(16384, 4096), (16384, 14336), (4096, 4096), (16384, 3584)]
E4M3 = torch.float8_e4m3fn


def plain(x: torch.Tensor, block_rows: int) -> list[torch.Tensor]:
    """The formula in PyTorch, both layouts, for extents that are multiples of 128."""
    out = []
    for t in (x, x.t()):
        blocks = t.reshape(t.shape[0] // block_rows, block_rows, t.shape[1] // 128, 128).float()
        scale = 448.0 / blocks.abs().amax((1, 3), keepdim=True)
        codes = (blocks * scale).clamp(-448, 448).to(E4M3).view(t.shape)
        inverse = (1.0 / scale).squeeze(3).squeeze(1)
        out += [codes, inverse.t().contiguous() if block_rows == 1 else inverse]
    return out


@harness.case("block_quantize")
def rows() -> Iterator[harness.Row]:
    for shape in SHAPES:
        x = harness.normal(*shape)
        n, back = x.numel(), torch.empty_like(x)
        for block_rows, blocks in ((1, "1x128"), (128, "128x128")):
            scales = n // 128 * 4 if block_rows == 1 else 0
            for layout, options in harness.LAYOUTS.items():
                out = block_quantize(x, E4M3, block_rows=block_rows, **options)
                cast = functools.partial(
                    block_quantize, x, E4M3, block_rows=block_rows, out=out, **options
                )
                compared = shape == SHAPES[0] and layout == "both"
                peers = harness.formula_peers(plain, x, block_rows) if compared else {}
                num_bytes = 2 * n + (n + scales) * sum(options.values())
                function = f"block_quantize {blocks} {layout}"
                yield harness.measure(function, shape, num_bytes, cast, peers)
            out = block_quantize(x, E4M3, block_rows=block_rows, columnwise=False)
            decode = functools.partial(block_dequantize, *out[:2], block_rows=block_rows, out=back)
            yield harness.measure(f"block_dequantize {blocks}", shape, 3 * n + scales, decode)
    x = harness.normal(64, 4096)
    for block_rows, blocks in ((1, "1x128"), (128, "128x128")):
        out = block_quantize(x, E4M3, block_rows=block_rows)
        cast = functools.partial(block_quantize, x, E4M3, block_rows=block_rows, out=out)
        yield harness.in_graph(f"block_quantize {blocks} both", cast)
    out, back = block_quantize(x, E4M3), torch.empty_like(x)
    decode = functools.partial(block_dequantize, *out[:2], out=back)
    yield harness.in_graph("block_dequantize 1x128", decode)
