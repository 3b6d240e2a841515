"""hif8: bandwidth over the floor's bytes, against torch.compile of the reference's formula.

Bytes counted for an element of bf16: read 2, write 1 for each layout, with a given scale; 2 more
with the current scale, whose amax is a pass of its own. Decode to bf16: read 1, write 2.
An element's encoding takes a product, a shift and a look-up of one byte in shared memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import harness
import torch

from apex_te.ops import hif8

SHAPES = [(16384, 4096), (16384, 14336), (4096, 4096), (16384, 3584)]


def plain(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encoding in PyTorch's integer arithmetic, both layouts, for finite values."""
    bits = (x.float() * scale).clamp(-32768.0, 32768.0).view(torch.int32)
    sign = (bits >> 24) & 0x80
    a = bits & 0x7FFFFFFF
    e = ((a >> 23) - 127).abs()
    width = torch.where(e < 4, 3, torch.where(e < 8, 2, torch.where(e < 16, 1, 0)))
    a = a + (1 << (22 - width))
    exponent = (a >> 23) - 127
    e = exponent.abs()
    width = torch.where(e < 4, 3, torch.where(e < 8, 2, 1))
    mantissa = (a & 0x7FFFFF) >> (23 - width)
    negative = (exponent < 0).int()
    base = torch.where(e < 4, 0x20, torch.where(e < 8, 0x40, 0x60))
    first = torch.where(e < 4, 2, torch.where(e < 8, 4, 8))
    code = base + (negative << 4) + ((e - first) << width) + mantissa
    code = torch.where(e == 1, 0x10 + (negative << 3) + mantissa, code)
    code = torch.where(e == 0, 0x08 + mantissa, code)
    code = torch.where(exponent <= -16, (exponent + 23).clamp(min=1), code) | sign
    code = torch.where((bits & 0x7FFFFFFF) < (127 - 23) << 23, 0, code).to(torch.uint8)
    return code, code.t().contiguous()


@harness.case("hif8")
def rows() -> Iterator[harness.Row]:
    for shape in SHAPES:
        x = harness.normal(*shape)
        n, scale = x.numel(), torch.full((1,), 3.1, device="cuda")
        back = torch.empty_like(x)
        for layout, copies, outputs in harness.layouts(x, torch.uint8):
            compared = shape == SHAPES[0] and layout == "both"
            peers = harness.formula_peers(plain, x, scale) if compared else {}
            given = functools.partial(hif8.quantize, x, scale, **outputs)
            current = functools.partial(hif8.quantize_current, x, **outputs)
            yield harness.measure(f"hif8 {layout}", shape, n * (2 + copies), given, peers)
            yield harness.measure(f"hif8 current {layout}", shape, n * (4 + copies), current)
        codes = hif8.encode(x)
        decode = functools.partial(hif8.decode, codes, scale_inv=scale, out=back)
        yield harness.measure("hif8 decode", shape, 3 * n, decode)
    x, scale = harness.normal(64, 4096), torch.ones(1, device="cuda")
    yield harness.in_graph("hif8 both", lambda: hif8.quantize(x, scale))
    yield harness.in_graph("hif8 current both", lambda: hif8.quantize_current(x))
