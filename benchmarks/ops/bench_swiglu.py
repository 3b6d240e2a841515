"""swiglu and swiglu_block: the gated activations in bf16 and to FP8, forward and backward.

Bytes counted for each element of the [M, F] output: forward 6 (read gate and up, write out), to
FP8 in both layouts 6 (4 read, 1 + 1 written); backward 10 (read both inputs and the gradient,
write two gradients), to FP8 in both layouts 10 (6 read, 2 + 2 written). The column sums of dbias
add a 32nd of an element's bytes, which are not counted.

``swiglu_block`` casts in 1x128 blocks in the same kernel, against the two ops, which write and read
a bf16 result between them. Each copy has 4 bytes more for 128 elements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import harness
import torch
from torch.nn import functional as F

from apex_te.ops import swiglu as op
from apex_te.ops.block_quantize import block_quantize
from apex_te.ops.swiglu_block import swiglu_bwd_block, swiglu_fwd_block

SHAPES = [(16384, 14336), (8192, 14336), (16384, 3584), (8192, 2048), (16384, 4095)]
BLOCK_SHAPES = [(8192, 14336), (16384, 14336), (16384, 3584), (8190, 3584), (16384, 4095)]
COMPILED = SHAPES[:2]  # each takes seconds to compile the peers
E4M3 = torch.float8_e4m3fn
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


def to_fp8(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    codes = values.clamp(-448, 448).to(E4M3)
    return codes, codes.t().contiguous(), values.abs().amax()


def fwd_fp8(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gate, up = (half.float() for half in x.chunk(2, dim=1))
    return to_fp8(F.silu(gate) * up)


def bwd_fp8(grad: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return to_fp8(bwd(grad, x.float()))


def eager_bwd(x: torch.Tensor, grad: torch.Tensor) -> Callable[[], Any]:
    leaf = x.clone().requires_grad_()
    out = fwd(leaf)
    return lambda: torch.autograd.grad(out, leaf, grad, retain_graph=True)


def liger(x: torch.Tensor, grad: torch.Tensor) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """liger-kernel's forward and backward of two tensors; its backward overwrites the inputs."""
    gate, up = (half.contiguous() for half in x.chunk(2, dim=1))
    over_gate, over_up = gate.clone(), up.clone()

    def run_fwd() -> Any:
        from liger_kernel.ops.swiglu import swiglu_forward

        return swiglu_forward(gate, up)

    def run_bwd() -> Any:
        from liger_kernel.ops.swiglu import swiglu_backward

        return swiglu_backward(over_gate, over_up, grad)

    return run_fwd, run_bwd


@harness.case("swiglu", SHAPES)
def rows_of(shape: tuple[int, int]) -> Iterator[harness.Row]:
    rows, cols = shape
    x, grad = harness.normal(rows, 2 * cols), harness.normal(rows, cols)
    scale, amax = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
    both: dict[str, Any] = {"amax": amax, "fp8_dtype": E4M3}

    def row(
        function: str, num_bytes: int, call: Callable[[], Any], peers: harness.Peers | None = None
    ) -> harness.Row:
        return harness.measure(function, shape, num_bytes * rows * cols, call, peers, repeats=20)

    def compile_peer(formula: Callable[..., Any], *args: torch.Tensor) -> harness.Peers:
        if shape not in COMPILED:
            return {}
        return {"compile": harness.formula_peers(formula, *args)["compile"]}

    liger_fwd, liger_bwd = liger(x, grad)
    peers = {"torch": lambda: fwd(x), "liger": liger_fwd, **compile_peer(fwd, x)}
    yield row("swiglu_fwd", 6, lambda: op.swiglu_fwd(x), peers)
    peers = {"torch": eager_bwd(x, grad), "liger": liger_bwd, **compile_peer(bwd, grad, x)}
    yield row("swiglu_bwd", 10, lambda: op.swiglu_bwd(grad, x), peers)
    fwd_to_fp8 = functools.partial(op.swiglu_fwd_fp8, x, None, scale, **both)
    peers = {"torch": lambda: fwd_fp8(x), **compile_peer(fwd_fp8, x)}
    yield row("swiglu_fwd_fp8, both", 6, fwd_to_fp8, peers)
    bwd_to_fp8 = functools.partial(op.swiglu_bwd_fp8, grad, x, None, scale, **both)
    peers = {"torch": lambda: bwd_fp8(grad, x), **compile_peer(bwd_fp8, grad, x)}
    yield row("swiglu_bwd_fp8, both", 10, bwd_to_fp8, peers)
    yield row("swiglu_bwd_fp8, both + dbias", 10, lambda: bwd_to_fp8(with_dbias=True))
    yield row("swiglu_bwd + dbias", 10, lambda: op.swiglu_bwd(grad, x, with_dbias=True))
    if shape != SHAPES[0]:
        return
    gate, up = x.chunk(2, dim=1)
    for activation, family in (("gelu", "geglu"), ("gelu_erf", "geglu_erf"), ("relu", "reglu")):
        kind = {"activation": activation}
        plain = ACTS.get(activation, F.gelu)
        peers = {"torch": lambda plain=plain: plain(gate) * up}
        yield row(f"{family}_fwd", 6, functools.partial(op.swiglu_fwd, x, **kind), peers)
        yield row(f"{family}_bwd", 10, functools.partial(op.swiglu_bwd, grad, x, **kind))
        yield row(f"{family}_fwd_fp8, both", 6, functools.partial(fwd_to_fp8, **kind))
        yield row(f"{family}_bwd_fp8, both", 10, functools.partial(bwd_to_fp8, **kind))


@harness.case("swiglu")
def small() -> Iterator[harness.Row]:
    """64 x 4096, warm L2, a CUDA graph of 100 calls."""
    x, grad = harness.normal(64, 8192), harness.normal(64, 4096)
    scale, amax = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
    calls: harness.Peers = {
        "swiglu_fwd": lambda: op.swiglu_fwd(x),
        "swiglu_bwd": lambda: op.swiglu_bwd(grad, x),
        "swiglu_fwd_fp8, both": lambda: op.swiglu_fwd_fp8(x, None, scale, E4M3, amax=amax),
        "swiglu_bwd_fp8, both": lambda: op.swiglu_bwd_fp8(grad, x, None, scale, E4M3, amax=amax),
    }
    for name, call in calls.items():
        yield harness.in_graph(name, call, "64x4096, warm, in a graph")


@harness.case("swiglu_block", BLOCK_SHAPES)
def block_rows(shape: tuple[int, int]) -> Iterator[harness.Row]:
    """The forward and the backward, both layouts, padded columns."""
    tokens, features = shape
    x, grad = harness.normal(tokens, 2 * features), harness.normal(tokens, features)
    pad, scales = {"pad_columnwise": True}, 2 * 4 / 128
    fwd = functools.partial(swiglu_fwd_block, x, None, E4M3, **pad)
    bwd = functools.partial(swiglu_bwd_block, grad, x, None, E4M3, **pad)
    peers: harness.Peers = {"two ops": lambda: block_quantize(op.swiglu_fwd(x), E4M3, **pad)}
    num_bytes = int((6 + scales) * tokens * features)
    yield harness.measure("swiglu_fwd_block, both", shape, num_bytes, fwd, peers, repeats=20)
    peers = {"two ops": lambda: block_quantize(op.swiglu_bwd(grad, x).input, E4M3, **pad)}
    num_bytes = int((10 + 2 * scales) * tokens * features)
    yield harness.measure("swiglu_bwd_block, both", shape, num_bytes, bwd, peers, repeats=20)
