"""Shared parts of bench_activation and bench_bias_gelu: tensors of a shape, peers, and the run.

Bytes counted for an element in bf16: forward 4 (read x, write y), to FP8 3 rowwise and 4 in both
layouts (2 read, 1 + 1 written); backward 6 (read dy and x, write dx), to FP8 in both layouts 6
(4 read, 1 + 1 written). The column sums of dbias add a 16th of a byte an element at each of their
two steps, which is not counted.

Tried on an H200 at 16384 x 14336, TB/s, gelu and exact gelu:
- Vectors, forward: 128 threads with 2 vectors in flight 4.19 and 4.18, with 1 4.23 and 3.76, with
  4 or 8 4.06; 64 with 4 4.16; 256 with 1 to 8 4.04 to 4.15; 512 3.99 to 4.09; 1024 3.79.
- To FP8 in both layouts, forward: tiles of 128 rows, 4 blocks on a multiprocessor 3.86 and 3.67;
  64 rows, 8 blocks 3.81 and 3.67; 256 rows, 2 blocks 3.90 and 3.25. More registers for fewer
  blocks, 64 x 6, 128 x 3, 128 x 2: exact gelu 3.61, 3.47, 3.47.
- The same backward with dbias: 64 rows, 5 blocks 3.87 and 3.76; 4 blocks 3.82 and 3.66; 6 blocks
  spill, 2.65; 4 or 2 of a thread's 8 rows at a time with 5 to 7 blocks 3.66 to 3.79 and 3.50 to
  3.65; 128 rows, 3 blocks 3.80 and 3.69.
- A derivative without its value (bounded_derivative), which needs fewer selections, and wider
  stores of the column sums took that from 3.73 and 3.58.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import harness
import torch

SHAPES = [(16384, 14336), (16384, 4096), (8192, 3584)]
E4M3 = torch.float8_e4m3fn
Row = tuple[str, int, Callable[[], Any], harness.Peers]  # function, bytes an element, call, peers


class Case:
    """Random tensors of one shape, and what an FP8 function is given besides."""

    def __init__(self, shape: tuple[int, int], with_peers: bool = True) -> None:
        self.is_first, self.with_peers = shape == SHAPES[0], with_peers
        self.x, self.dy = (harness.normal(*shape) for _ in range(2))
        self.bias = harness.normal(shape[1])
        self.scale, self.amax = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")

    def peers(self, formula: Callable[..., Any], *args: Any, eager: bool = True) -> harness.Peers:
        """The plain formula as it is and, for the first shape, compiled: that takes seconds."""
        calls: harness.Peers = {}
        if self.with_peers and eager:
            calls["torch"] = lambda: formula(*args)
        if self.with_peers and self.is_first:
            compiled = harness.compiled(formula)
            calls["compile"] = lambda: compiled(*args)
        return calls


def to_fp8(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Codes, their transpose and the amax; the scale is 1."""
    codes = values.clamp(-448, 448).to(E4M3)
    return codes, codes.t().contiguous(), values.abs().amax()


def run(name: str, functions: Callable[[Case], list[Row]]) -> None:
    def rows() -> Iterator[harness.Row]:
        for shape in SHAPES:
            numel = shape[0] * shape[1]
            for function, num_bytes, call, peers in functions(Case(shape)):
                yield harness.measure(function, shape, num_bytes * numel, call, peers, repeats=20)
        for function, _, call, _ in functions(Case((64, 4096), with_peers=False)):
            yield harness.in_graph(function, call, "64x4096, warm, in a graph")

    harness.run(name, rows())
