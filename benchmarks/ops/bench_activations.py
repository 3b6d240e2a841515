"""activation and bias_gelu: in bf16 and straight to FP8, with dbias.

Bytes counted for an element in bf16: forward 4 (read x, write y), to FP8 3 rowwise and 4 in both
layouts (2 read, 1 + 1 written); backward 6 (read dy and x, write dx), to FP8 in both layouts 6
(4 read, 1 + 1 written). The column sums of dbias add a 16th of a byte an element at each of their
two steps, which is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import harness
import torch
from torch.nn import functional as F

from apex_te.ops import activation, bias_gelu

SHAPES = [(16384, 14336), (16384, 4096), (8192, 3584)]
E4M3 = torch.float8_e4m3fn
Row = tuple[str, int, Callable[[], Any], harness.Peers]  # function, bytes an element, call, peers


class Case:
    """Random tensors of one shape, and what an FP8 function is given besides."""

    def __init__(self, shape: tuple[int, int], with_peers: bool = True) -> None:
        self.is_first, self.with_peers = shape == SHAPES[0], with_peers
        self.x, self.dy = (harness.normal(*shape) for _ in range(2))
        self.bias = harness.normal(shape[1])
        scale, amax = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
        self.fp8: dict[str, Any] = {"scale": scale, "fp8_dtype": E4M3, "amax": amax}

    def peers(self, formula: Callable[..., Any], *args: Any, eager: bool = True) -> harness.Peers:
        """The plain formula as it is and, for the first shape, compiled: that takes seconds."""
        calls: harness.Peers = {}
        if self.with_peers and eager:
            calls["torch"] = partial(formula, *args)
        if self.with_peers and self.is_first:
            calls["compile"] = partial(harness.compiled(formula), *args)
        return calls


def to_fp8(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Codes, their transpose and the amax; the scale is 1."""
    codes = values.clamp(-448, 448).to(E4M3)
    return codes, codes.t().contiguous(), values.abs().amax()


def gelu(x: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(x + bias[0] if bias else x, approximate="tanh")


def gelu_bwd(dy: torch.Tensor, x: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.gelu_backward(dy, x + bias[0] if bias else x, approximate="tanh")


def gelu_fp8(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return to_fp8(gelu(*(t.float() for t in args)))


def gelu_bwd_fp8(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
    dx = gelu_bwd(*(t.float() for t in args))
    return *to_fp8(dx), *([dx.sum(0)] if len(args) == 3 else [])


def with_dbias(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dx = gelu_bwd(*args)
    return dx, dx.sum(0)


def eager_bwd(x: torch.Tensor, kind: str, dy: torch.Tensor) -> Callable[[], Any]:
    leaf = x.detach().requires_grad_()
    y = activation.reference(leaf, kind)
    return lambda: torch.autograd.grad(y, leaf, dy, retain_graph=True)


def of_activation(case: Case) -> list[Row]:
    x, dy, peers, op = case.x, case.dy, case.peers, activation

    def of(kind: str) -> list[partial[Any]]:
        """Forward and backward, and both to FP8."""
        return [
            partial(op.activation_fwd, x, kind), partial(op.activation_bwd, dy, x, kind),
            partial(op.activation_fwd_fp8, x, kind, **case.fp8),
            partial(op.activation_bwd_fp8, dy, x, kind, **case.fp8),
        ]  # fmt: skip

    fwd, bwd, fwd_fp8, bwd_fp8 = of("gelu")
    rows: list[Row] = [
        ("gelu_fwd", 4, fwd, peers(gelu, x)),
        ("gelu_bwd", 6, bwd, peers(gelu_bwd, dy, x)),
        ("gelu_fwd_fp8, rowwise", 3, partial(fwd_fp8, columnwise=False), {}),
        ("gelu_fwd_fp8, both", 4, fwd_fp8, peers(gelu_fp8, x, eager=False)),
        ("gelu_bwd_fp8, both", 6, bwd_fp8, peers(gelu_bwd_fp8, dy, x, eager=False)),
    ]
    for kind in op.KINDS[1:] if case.is_first else ():
        fwd, bwd, fwd_fp8, bwd_fp8 = of(kind)
        rows += [
            (f"{kind}_fwd", 4, fwd, {"torch": partial(op.reference, x, kind)}),
            (f"{kind}_bwd", 6, bwd, {"torch": eager_bwd(x, kind, dy)}),
            (f"{kind}_fwd_fp8, both", 4, fwd_fp8, {}),
            (f"{kind}_bwd_fp8, both", 6, bwd_fp8, {}),
        ]
    return rows


def of_bias_gelu(case: Case) -> list[Row]:
    (x, dy, bias), peers, op = (case.x, case.dy, case.bias), case.peers, bias_gelu
    fwd, bwd = partial(op.bias_gelu_fwd, x, bias), partial(op.bias_gelu_bwd, dy, x, bias)
    fwd_fp8 = partial(op.bias_gelu_fwd_fp8, x, bias, **case.fp8)
    bwd_fp8 = partial(op.bias_gelu_bwd_fp8, dy, x, bias, **case.fp8)
    dbias, erf = {"with_dbias": True}, {"form": "erf"}
    rows: list[Row] = [
        ("bias_gelu_fwd", 4, fwd, peers(gelu, x, bias)),
        ("bias_gelu_bwd", 6, bwd, peers(gelu_bwd, dy, x, bias)),
        ("bias_gelu_bwd + dbias", 6, partial(bwd, **dbias), peers(with_dbias, dy, x, bias)),
        ("bias_gelu_fwd_fp8, both", 4, fwd_fp8, peers(gelu_fp8, x, bias, eager=False)),
        ("bias_gelu_bwd_fp8, both", 6, bwd_fp8, {}),
        ("bias_gelu_bwd_fp8, both + dbias", 6, partial(bwd_fp8, **dbias),
         peers(gelu_bwd_fp8, dy, x, bias, eager=False)),
    ]  # fmt: skip
    if case.is_first:
        rows += [
            ("bias_gelu_fwd, erf", 4, partial(fwd, **erf), {}),
            ("bias_gelu_bwd + dbias, erf", 6, partial(bwd, **erf, **dbias), {}),
            ("bias_gelu_bwd_fp8, both + dbias, erf", 6, partial(bwd_fp8, **erf, **dbias), {}),
        ]
    return rows


@harness.case("activation", [of_activation])
@harness.case("bias_gelu", [of_bias_gelu])
def rows(functions: Callable[[Case], list[Row]]) -> Iterator[harness.Row]:
    for shape in SHAPES:
        for function, size, call, peers in functions(Case(shape)):
            num_bytes = size * shape[0] * shape[1]
            yield harness.measure(function, shape, num_bytes, call, peers, repeats=20)
    for function, _, call, _ in functions(Case((64, 4096), with_peers=False)):
        yield harness.in_graph(function, call, "64x4096, warm, in a graph")
