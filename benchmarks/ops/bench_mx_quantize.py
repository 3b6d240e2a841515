"""mx_quantize: bandwidth over the floor's bytes, against torch eager and torch.compile.

Floor in bytes an element of bf16: read 2, write 1 for each layout and 1/32 for its scales.
Dequantize to bf16: read 1 and 1/32, write 2.

Both layouts at 16384x4096 on an H200 take 82 us, 73 without their scales, where a tile of 128 x 128
writes a word of scales for each of its 256 lines, each in a line of memory of its own. Large
matrices write the scales of a tile together and order them in a second kernel: 283 to 261 us at
16384x14336 with blocks of 128 lines that lie together, but 82 again at 16384x4096, where few blocks
order long lines; so 8 lines lie together. Merging the words of neighbouring tiles did not help: an
order of tiles by groups of 8 rows, 88 us; scales stored before the codes, 82; clusters of 2 to 8
tiles that exchange them (87 to 89), 2 or 4 tiles of a block in turn (83, 85), 2 at once (82, and
slower where the matrix is small). Nor did 2 or 4 blocks of an SM instead of 3 (84, 91) or a warp of
16 rows of 128 columns (82).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

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


if __name__ == "__main__":
    harness.run("mx_quantize", rows())
