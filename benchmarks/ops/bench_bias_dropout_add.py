"""bias_dropout_add: bandwidth against a copy of the same bytes and against the plain formula.

Bytes counted an element, bf16: forward 6 (read x and residual, write out), 10 with a float32
residual; backward 4 (read dout, write dx). The draw of the seed, one launch of torch.randint, is
part of the forward rows but where the seed is given. The peers keep a mask, a byte for each element
more to write and to read; their backward runs through autograd.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import harness
import torch
import torch.nn.functional as F

from apex_te.ops.bias_dropout_add import bias_dropout_add, bias_dropout_add_bwd

P = 0.1
BOTH = {"x_dtype": torch.bfloat16, "bias_dtype": torch.bfloat16}
SHAPES = [(16384, 4096), (16384, 14336), (4096, 4096), (16384, 3584)]


def formula(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, p: float) -> torch.Tensor:
    return residual + F.dropout(x + bias, p)


@harness.case("bias_dropout_add", SHAPES)
def rows_of(shape: tuple[int, int]) -> Iterator[harness.Row]:
    def row(function: str, num_bytes: int, call: Any, peers: Any = None) -> harness.Row:
        return harness.measure(function, shape, num_bytes * x.numel(), call, peers)

    seed = torch.tensor([1], device="cuda")
    x, residual, dout = (harness.normal(*shape) for _ in range(3))
    bias = harness.normal(shape[1])
    args = (x, bias, residual, P)
    peers = harness.formula_peers(formula, *args)
    yield row("bias_dropout_add fwd", 6, lambda: bias_dropout_add(*args), peers)
    formulas = {"torch": formula, "compile": harness.compiled(formula)}
    peers = {
        n: harness.backward(lambda *t, f=f: f(*t, P), args[:3], dout) for n, f in formulas.items()
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


@harness.graph_case("bias_dropout_add", "64x4096")
def small(x: torch.Tensor) -> harness.Peers:
    seed = torch.tensor([1], device="cuda")
    forward = functools.partial(bias_dropout_add, x, harness.normal(4096), torch.randn_like(x), P)
    calls = {
        "fwd": forward,
        "fwd, seed given": functools.partial(forward, seed=seed),
        "bwd, dx and dbias": lambda: bias_dropout_add_bwd(x, seed, P, **BOTH),
    }
    return {f"bias_dropout_add {name}, graph, warm": call for name, call in calls.items()}
