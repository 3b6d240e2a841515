"""bias_dropout_add: bandwidth against a copy of the same bytes and against the plain formula.

Bytes counted an element, bf16: forward 6 (read x and residual, write out), 10 with a float32
residual; backward 4 (read dout, write dx). The draw of the seed, one launch of torch.randint, is
part of the forward rows but where the seed is given. The peers keep a mask, a byte for each element
more to write and to read; their backward runs through autograd.

Backward is near its arithmetic: Philox, the choice and the products are about 140 instructions for
8 elements, 40 of the 68 us at 16384x4096. dbias costs 5 us more: 4 MB of partial sums, the sums
within a block, and a second launch. What did not help on an H200, us at 16384x4096 without and with
dbias, where a copy_ takes 67 and the kernel as it is 68.8 / 73.5: the loads into shared memory with
cp.async and 3, 4 or 5 blocks of a multiprocessor, 70.2 / 75.1, 76.5 / 81.9, 77.7 / 83.1. When the
products of Philox took an instruction more (68.9 / 75.5): four blocks of a multiprocessor
(64 registers), 70.7 / 77.1; tiles of 128 rows in blocks of 512 threads, 72.6 / 79.2, and of 256
rows, 76.0 / 83.3; 16 rows a thread, half of them loaded while the others are computed, 72.2 / 76.5,
and 32 rows, 74.6 / 78.1; the random bits computed row by row after the loads, 70.7 / 76.8; the
second kernel allowed to start early, 0.5 us slower; its blocks of 64 columns, 0.6 us slower.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

from apex_te.ops.bias_dropout_add import bias_dropout_add, bias_dropout_add_bwd

P = 0.1
BOTH = {"x_dtype": torch.bfloat16, "bias_dtype": torch.bfloat16}
SHAPES = [(16384, 4096), (16384, 14336), (4096, 4096), (16384, 3584)]


def formula(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, p: float) -> torch.Tensor:
    return residual + F.dropout(x + bias, p)


def gradients(function: Any, leaves: list[torch.Tensor], dout: torch.Tensor) -> Any:
    """A call that runs the backward of one forward again and again."""
    out = function(*leaves, P)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def rows_of(shape: tuple[int, int], seed: torch.Tensor) -> Iterator[harness.Row]:
    def row(function: str, num_bytes: int, call: Any, peers: Any = None) -> harness.Row:
        return harness.measure(function, shape, num_bytes * x.numel(), call, peers)

    x, residual, dout = (harness.normal(*shape) for _ in range(3))
    bias = harness.normal(shape[1])
    leaves = [t.clone().requires_grad_() for t in (x, bias, residual)]
    args = (x, bias, residual, P)
    peers = harness.formula_peers(formula, *args)
    yield row("bias_dropout_add fwd", 6, lambda: bias_dropout_add(*args), peers)
    peers = {
        "torch": gradients(formula, leaves, dout),
        "compile": gradients(harness.compiled(formula), leaves, dout),
    }
    bwd = functools.partial(bias_dropout_add_bwd, dout, seed, P)
    dx = functools.partial(bwd, x_dtype=torch.bfloat16)
    yield row("bias_dropout_add bwd, dx and dbias", 4, lambda: bwd(**BOTH), peers)
    yield row("bias_dropout_add bwd, dx", 4, dx)
    if shape != SHAPES[0]:
        return
    yield row("fwd, seed given", 6, lambda: bias_dropout_add(*args, seed=seed))
    yield row("fwd, p = 0", 6, lambda: bias_dropout_add(*args[:3], 0.0))
    wide = residual.float()
    yield row("fwd, float32 residual", 10, lambda: bias_dropout_add(x, bias, wide, P))


def rows() -> Iterator[harness.Row]:
    seed = torch.tensor([1], device="cuda")
    for shape in SHAPES:
        yield from rows_of(shape, seed)
    x, residual = (harness.normal(64, 4096) for _ in range(2))
    bias = harness.normal(4096)
    small = {
        "fwd": lambda: bias_dropout_add(x, bias, residual, P),
        "fwd, seed given": lambda: bias_dropout_add(x, bias, residual, P, seed=seed),
        "bwd, dx and dbias": lambda: bias_dropout_add_bwd(x, seed, P, **BOTH),
    }
    for name, call in small.items():
        yield harness.in_graph(f"bias_dropout_add {name}, graph, warm", call, "64x4096")


if __name__ == "__main__":
    harness.run("bias_dropout_add", rows())
