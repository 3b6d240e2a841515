"""byte_transpose: bandwidth over the floor's 2 bytes an element, against PyTorch's copy."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import harness
import torch

from apex_te.ops.byte_transpose import byte_transpose

SHAPES = [(16384, 4096), (16384, 14336), (8192, 4096), (4096, 4096), (16383, 4095)]


@harness.case("byte_transpose")
def rows() -> Iterator[harness.Row]:
    for shape in SHAPES:
        codes = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
        out = codes.new_empty(shape[::-1])
        call = functools.partial(byte_transpose, codes, out=out)
        peers = {"torch": functools.partial(out.copy_, codes.t())}
        yield harness.measure("byte_transpose", shape, 2 * codes.numel(), call, peers)
    small = torch.randint(0, 256, (64, 4096), dtype=torch.uint8, device="cuda")
    yield harness.in_graph("byte_transpose", lambda: byte_transpose(small))
