"""Ops at shapes of many models, odd numbers of rows and columns among them, without peers.

The rows are those of the ops' own files. Copies of FP8 data are not padded here. The head has the
least part of a copy's speed for each shape, and how many rows are below 0.85 of it, or below 0.6 at
odd sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import harness

SHAPES = [
    (8192, 2048), (16384, 4096), (8192, 5120), (32768, 7168), (65536, 4096), (8192, 8192),
    (4096, 16384), (131072, 1024), (100000, 768), (2048, 14336), (8190, 3584), (8192, 3000),
    (8192, 4095), (300, 4096),
]  # fmt: skip
ODD = [harness.text_of(shape) for shape in SHAPES if shape[0] % 16 or shape[1] % 16]
# Whose first arguments, before the shape, are those of their first case.
OPS = (
    "rms_norm", "layer_norm", "cast_transpose", "current_scale", "block_quantize", "mx_quantize",
    "hif8", "row_quantize", "byte_transpose", "activation", "bias_gelu", "swiglu", "swiglu_block",
    "bias_dropout_add", "cross_entropy",
)  # fmt: skip


def sums(rows: list[harness.Row]) -> dict[str, Any]:
    ratios = [(row["shape"], row["of copy"]) for row in rows]
    least = {shape: min(r for s, r in ratios if s == shape) for shape, _ in ratios}
    below = [(shape, r) for shape, r in ratios if r < (0.6 if shape in ODD else 0.85)]
    counts = {shape: sum(s == shape for s, _ in below) for shape in least}
    return {"rows of all": len(rows), "least of copy": least, "rows below": counts}


@harness.case("shapes", sums=sums)
def rows() -> Iterator[harness.Row]:
    for op in OPS:
        first = harness.CASES[op][0]
        assert isinstance(first, partial)
        for shape in SHAPES:
            harness.with_peers = False
            for row in first.func(*first.args[:-1], shape):
                kept = ("function", "outputs", "shape", "us", "of copy")
                yield {"function": op, **{key: row[key] for key in kept if key in row}}
            harness.with_peers = True
