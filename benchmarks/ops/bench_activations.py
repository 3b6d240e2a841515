"""activation and bias_gelu: in bf16 and straight to FP8, with dbias.

Bytes counted for an element in bf16: forward 4 (read x, write y), to FP8 3 rowwise and 4 in both
layouts (2 read, 1 + 1 written); backward 6 (read dy and x, write dx), to FP8 in both layouts 6
(4 read, 1 + 1 written). The column sums of dbias add a 16th of a byte an element at each of their
two steps, which is not counted.

swiglu and swiglu_block: the gated activations in bf16 and to FP8, forward and backward.

Bytes counted for each element of the [M, F] output: forward 6 (read gate and up, write out), to
FP8 in both layouts 6 (4 read, 1 + 1 written); backward 10 (read both inputs and the gradient,
write two gradients), to FP8 in both layouts 10 (6 read, 2 + 2 written). The column sums of dbias
add a 32nd of an element's bytes, which are not counted.

``swiglu_block`` casts in 1x128 blocks in the same kernel, against the two ops, which write and read
a bf16 result between them. Each copy has 4 bytes more for 128 elements.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import harness
import torch
from torch.nn import functional as F

from apex_te.ops import activation, bias_gelu, swiglu
from apex_te.ops.block_quantize import block_quantize
from apex_te.ops.swiglu_block import swiglu_bwd_block, swiglu_fwd_block

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


def of_activation(case: Case) -> list[Row]:
    x, dy, peers, op = case.x, case.dy, case.peers, activation

    def of(kind: str) -> list[partial[Any]]:
        forward, backward = (x, kind), (dy, x, kind)
        plain = [partial(op.activation_fwd, *forward), partial(op.activation_bwd, *backward)]
        fwd_fp8 = partial(op.activation_fwd_fp8, *forward, **case.fp8)
        return [*plain, fwd_fp8, partial(op.activation_bwd_fp8, *backward, **case.fp8)]

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
        plain = partial(op.reference, kind=kind)
        rows += [
            (f"{kind}_fwd", 4, fwd, {"torch": partial(plain, x)}),
            (f"{kind}_bwd", 6, bwd, {"torch": harness.backward(plain, [x], dy)}),
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


FUNCTIONS = {"activation": of_activation, "bias_gelu": of_bias_gelu}


@harness.case("activation", ["activation"] * len(SHAPES), SHAPES)
@harness.case("bias_gelu", ["bias_gelu"] * len(SHAPES), SHAPES)
def rows(name: str, shape: tuple[int, int]) -> Iterator[harness.Row]:
    for function, size, call, peers in FUNCTIONS[name](Case(shape)):
        num_bytes = size * shape[0] * shape[1]
        yield harness.measure(function, shape, num_bytes, call, peers, repeats=20)


@harness.case("activation", ["activation"])
@harness.case("bias_gelu", ["bias_gelu"])
def small_rows(name: str) -> Iterator[harness.Row]:
    for function, _, call, _ in FUNCTIONS[name](Case((64, 4096), with_peers=False)):
        yield harness.in_graph(function, call, "64x4096, warm, in a graph")


GATED = [(16384, 14336), (8192, 14336), (16384, 3584), (8192, 2048), (16384, 4095)]
BLOCK_SHAPES = [(8192, 14336), (16384, 14336), (16384, 3584), (8190, 3584), (16384, 4095)]
COMPILED = GATED[:2]  # each takes seconds to compile the peers
ACTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def fwd(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=1)
    return F.silu(gate) * up


def bwd(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    gate, up = (half.float() for half in x.chunk(2, dim=1))
    s = torch.sigmoid(gate)
    dgate = grad.float() * up * (s + gate * s * (1 - s))
    return torch.cat([dgate, grad.float() * gate * s], dim=1).to(x.dtype)


def fwd_fp8(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gate, up = (half.float() for half in x.chunk(2, dim=1))
    return to_fp8(F.silu(gate) * up)


def bwd_fp8(grad: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return to_fp8(bwd(grad, x.float()))


def liger(x: torch.Tensor, grad: torch.Tensor) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """liger-kernel's forward and backward of two tensors; its backward overwrites the inputs."""
    gate, up = (half.contiguous() for half in x.chunk(2, dim=1))
    over_gate, over_up = gate.clone(), up.clone()

    def run(way: str, *given: torch.Tensor) -> Any:
        return getattr(importlib.import_module("liger_kernel.ops.swiglu"), way)(*given)

    forward = partial(run, "swiglu_forward", gate, up)
    return forward, partial(run, "swiglu_backward", over_gate, over_up, grad)


def gated_calls(x: torch.Tensor, grad: torch.Tensor) -> dict[str, partial[Any]]:
    scale, amax = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
    both: dict[str, Any] = {"amax": amax, "fp8_dtype": E4M3}
    return {
        "fwd": partial(swiglu.swiglu_fwd, x),
        "bwd": partial(swiglu.swiglu_bwd, grad, x),
        "fwd_fp8, both": partial(swiglu.swiglu_fwd_fp8, x, None, scale, **both),
        "bwd_fp8, both": partial(swiglu.swiglu_bwd_fp8, grad, x, None, scale, **both),
    }


@harness.case("swiglu", GATED)
def rows_of(shape: tuple[int, int]) -> Iterator[harness.Row]:
    rows, cols = shape
    x, grad = harness.normal(rows, 2 * cols), harness.normal(rows, cols)
    calls, dbias = gated_calls(x, grad), {"with_dbias": True}

    def row(function: str, call: Callable[[], Any], peers: harness.Peers | None) -> harness.Row:
        num_bytes = (10 if "_bwd" in function else 6) * rows * cols
        return harness.measure(function, shape, num_bytes, call, peers, repeats=20)

    liger_fwd, liger_bwd = liger(x, grad)
    formulas = (
        (fwd, {"torch": partial(fwd, x), "liger": liger_fwd}, (x,)),
        (bwd, {"torch": harness.backward(fwd, [x], grad), "liger": liger_bwd}, (grad, x)),
        (fwd_fp8, {"torch": partial(fwd_fp8, x)}, (x,)),
        (bwd_fp8, {"torch": partial(bwd_fp8, grad, x)}, (grad, x)),
    )
    for (name, call), (formula, peers, given) in zip(calls.items(), formulas, strict=True):
        compiled = harness.compile_peer(formula, *given) if shape in COMPILED else {}
        yield row(f"swiglu_{name}", call, {**peers, **compiled})
    yield row("swiglu_bwd_fp8, both + dbias", partial(calls["bwd_fp8, both"], **dbias), None)
    yield row("swiglu_bwd + dbias", partial(calls["bwd"], **dbias), None)
    if shape != GATED[0]:
        return
    gate, up = x.chunk(2, dim=1)
    for gate_kind, family in (("gelu", "geglu"), ("gelu_erf", "geglu_erf"), ("relu", "reglu")):
        plain = ACTS.get(gate_kind, F.gelu)
        for name, call in calls.items():
            peers = {"torch": lambda plain=plain: plain(gate) * up} if name == "fwd" else None
            yield row(f"{family}_{name}", partial(call, activation=gate_kind), peers)


@harness.graph_case("swiglu", "64x4096, warm, in a graph", (64, 8192))
def small(x: torch.Tensor) -> harness.Peers:
    calls = gated_calls(x, harness.normal(64, 4096))
    return {f"swiglu_{name}": call for name, call in calls.items()}


@harness.case("swiglu_block", BLOCK_SHAPES)
def block_rows(shape: tuple[int, int]) -> Iterator[harness.Row]:
    """The forward and the backward, both layouts, padded columns."""
    tokens, features = shape
    x, grad = harness.normal(tokens, 2 * features), harness.normal(tokens, features)
    pad, scales = {"pad_columnwise": True}, 2 * 4 / 128
    fwd = partial(swiglu_fwd_block, x, None, E4M3, **pad)
    bwd = partial(swiglu_bwd_block, grad, x, None, E4M3, **pad)
    peers: harness.Peers = {"two ops": lambda: block_quantize(swiglu.swiglu_fwd(x), E4M3, **pad)}
    num_bytes = int((6 + scales) * tokens * features)
    yield harness.measure("swiglu_fwd_block, both", shape, num_bytes, fwd, peers, repeats=20)
    peers = {"two ops": lambda: block_quantize(swiglu.swiglu_bwd(grad, x).input, E4M3, **pad)}
    num_bytes = int((10 + 2 * scales) * tokens * features)
    yield harness.measure("swiglu_bwd_block, both", shape, num_bytes, bwd, peers, repeats=20)
