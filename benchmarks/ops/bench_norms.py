"""layer_norm and rms_norm, every function, against a copy of the same bytes and their peers.

Bytes counted, an element for bf16: forward 4 (read x, write y), to FP8 rowwise 3, both layouts 4,
backward 6 (read dy and x, write dx); with a residual 8 (forward also reads the residual and writes
the sum, backward also reads the residual's gradient).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import harness
import torch
from torch.nn import functional as F

from apex_te.ops import layer_norm, rms_norm

SHAPES = [
    (16384, 4096), (65536, 4096), (16384, 3584), (262144, 256), (65536, 1024), (8192, 8192),
    (4096, 16384), (2048, 32768), (512, 131072), (16383, 4095), (12288, 5120), (7168, 2112),
    (32768, 7168),
]  # fmt: skip
EPS = 1e-5
FP8 = torch.float8_e4m3fn
Calls = harness.Peers


class Case:
    """Random tensors of one shape for one op, and its functions as calls."""

    def __init__(self, op: ModuleType, shape: tuple[int, int]) -> None:
        self.name = op.__name__.rpartition(".")[2]
        self.centres = self.name == "layer_norm"
        self.fwd, self.fp8, self.bwd = (
            getattr(op, self.name + suffix) for suffix in ("_fwd", "_fwd_fp8", "_bwd")
        )
        self.cols = shape[1]
        # Each input its own: one that is read twice comes from L2 the second time.
        self.x, self.dy, self.residual = (harness.normal(*shape) for _ in range(3))
        self.params = [harness.normal(self.cols) for _ in range(1 + self.centres)]
        out = self.fwd(self.x, *self.params, EPS)
        self.rest = [self.params[0], *(t for t in (out.mean, out.rstd) if t is not None)]
        self.one, self.amax = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
        self.inverse = torch.ones(1, device="cuda")

    def quantize(self, **options: Any) -> Any:
        given = {"amax": self.amax, "scale_inv": self.inverse, **options}
        return self.fp8(self.x, *self.params, EPS, self.one, FP8, **given)

    def formula(self, x: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        norm = F.layer_norm if self.centres else F.rms_norm
        return norm(x, (self.cols,), *params, eps=EPS)

    def fwd_peers(self) -> Calls:
        peers = harness.formula_peers(self.formula, self.x, *self.params)
        return {**peers, "liger": self.liger_fwd}

    def bwd_peers(self) -> Calls:
        def gradients(call: Callable[..., torch.Tensor]) -> Callable[[], Any]:
            leaves = [t.clone().requires_grad_() for t in (self.x, *self.params)]
            y = call(*leaves)
            return lambda: torch.autograd.grad(y, leaves, self.dy, retain_graph=True)

        peers = {"torch": gradients(self.formula)}
        try:
            peers["compile"] = gradients(harness.compiled(self.formula))
            peers["liger"] = self.liger_bwd()
        except Exception as error:  # a peer's own limits are its own
            print(f"{self.name} bwd: a peer was not run: {error!r:.200}")
        return peers

    def liger_fwd(self) -> Any:
        if self.centres:
            from liger_kernel.ops.layer_norm import layer_norm_forward

            return layer_norm_forward(self.x, *self.params, EPS)
        from liger_kernel.ops.rms_norm import rms_norm_forward

        return rms_norm_forward(self.x, *self.params, EPS, 0.0, "llama", None)

    def liger_bwd(self) -> Callable[[], Any]:
        if self.centres:
            from liger_kernel.ops.layer_norm import layer_norm_backward

            _, x, mean, rstd, *_ = self.liger_fwd()
            return lambda: layer_norm_backward(self.dy, x, *self.params, mean, rstd)
        from liger_kernel.ops.rms_norm import rms_norm_backward

        _, x, rstd, block, warps, mode = self.liger_fwd()
        return lambda: rms_norm_backward(
            self.dy, x, *self.params, rstd, 0.0, mode, block, warps, False, None
        )

    def fp8_peers(self, transposed: bool) -> Calls:
        def formula(x: torch.Tensor, *params: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = self.formula(x.float(), *(p.float() for p in params))
            codes = (y * self.one).clamp(-448, 448).to(FP8)
            return codes, y.abs().amax(), *([codes.t().contiguous()] if transposed else [])

        compiled = harness.compiled(formula)
        return {"compile": lambda: compiled(self.x, *self.params)}

    def functions(self, with_peers: bool) -> list[tuple[str, int, Callable[[], Any], Calls]]:
        """(function, bytes of an element, call, peers)."""
        residual = self.residual
        none: Calls = {}
        return [
            ("fwd", 4, lambda: self.fwd(self.x, *self.params, EPS),
             self.fwd_peers() if with_peers else none),
            ("bwd", 6, lambda: self.bwd(self.dy, self.x, *self.rest),
             self.bwd_peers() if with_peers else none),
            ("fwd to FP8 rowwise", 3, lambda: self.quantize(columnwise=False),
             self.fp8_peers(False) if with_peers else none),
            ("fwd to FP8 both", 4, self.quantize, self.fp8_peers(True) if with_peers else none),
            ("residual fwd", 8, lambda: self.fwd(self.x, *self.params, EPS, residual=residual),
             none),
            ("residual bwd", 8,
             lambda: self.bwd(self.dy, self.x, *self.rest, d_residual=residual), none),
            ("residual fwd to FP8 both", 8, lambda: self.quantize(residual=residual), none),
        ]  # fmt: skip


@harness.case("layer_norm", [layer_norm])
@harness.case("rms_norm", [rms_norm])
def rows(op: ModuleType) -> Iterator[harness.Row]:
    for shape in SHAPES:
        case = Case(op, shape)
        for function, element_bytes, call, peers in case.functions(shape[1] in (3584, 4096, 16384)):
            num_bytes = case.x.numel() * element_bytes
            name = f"{case.name} {function}"
            yield harness.measure(name, shape, num_bytes, call, peers, repeats=20)
    small = Case(op, (64, 4096))
    for function, _, call, _ in small.functions(with_peers=False):
        two = "bwd" in function or "both" in function  # few tiles: statistics first
        launches = "two launches" if two else "one launch"
        name = f"{small.name} {function}, graph, warm, {launches}"
        yield harness.in_graph(name, call, "64x4096")
