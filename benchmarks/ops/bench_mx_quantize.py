"""mx_quantize: bandwidth over the floor's bytes, against torch eager and torch.compile.

Floor in bytes an element of bf16: read 2, write 1 for each layout and 1/32 for its scales.
Dequantize to bf16: read 1 and 1/32, write 2.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import harness
import torch

from apex_te.ops.mx_quantize import mx_dequantize, mx_quantize

SHAPES = [(16384, 4096), (16384, 14336), (4096, 4096), (16384, 3584)]


def plain(x: torch.Tensor) -> list[torch.Tensor]:
    """The formula in PyTorch, both layouts, for finite values and multiples of 32."""
    out = []
    for t in (x, x.t()):
        blocks = t.reshape(t.shape[0], t.shape[1] // 32, 32).float()
        bits = (blocks.abs().amax(2) / 448.0).view(torch.int32)
        code = ((bits + 0x7FFFFF) >> 23).clamp(max=254)
        multiplier = ((254 - code) << 23).view(torch.float32)
        codes = (blocks * multiplier[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        out += [codes.view(t.shape), code.to(torch.uint8)]
    return out


@harness.case("mx_quantize")
def rows() -> Iterator[harness.Row]:
    for shape in SHAPES:
        x = harness.normal(*shape)
        n, back = x.numel(), torch.empty_like(x)
        for layout, options in harness.LAYOUTS.items():
            out = mx_quantize(x, **options)
            cast = functools.partial(mx_quantize, x, out=out, **options)
            compared = shape == SHAPES[0] and layout == "both"
            peers = harness.formula_peers(plain, x) if compared else {}
            num_bytes = 2 * n + (n + n // 32) * sum(options.values())
            yield harness.measure(f"mx_quantize {layout}", shape, num_bytes, cast, peers)
        out = mx_quantize(x, columnwise=False)
        decode = functools.partial(mx_dequantize, *out[:2], out=back)
        yield harness.measure("mx_dequantize", shape, 3 * n + n // 32, decode)
    x = harness.normal(64, 4096)
    out, back = mx_quantize(x), torch.empty_like(x)
    yield harness.in_graph("mx_quantize both", lambda: mx_quantize(x, out=out))
    yield harness.in_graph("mx_dequantize", lambda: mx_dequantize(*out[:2], out=back))
