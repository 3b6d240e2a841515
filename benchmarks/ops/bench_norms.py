"""layer_norm and rms_norm, every function, against a copy of the same bytes and their peers.

Bytes counted, an element for bf16: forward 4 (read x, write y), to FP8 rowwise 3, both layouts 4,
backward 6 (read dy and x, write dx); with a residual 8 (forward also reads the residual and writes
the sum, backward also reads the residual's gradient).
"""

from __future__ import annotations

import functools
import importlib
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
        inputs = [self.x, *self.params]
        peers = {"torch": harness.backward(self.formula, inputs, self.dy)}
        try:
            peers["compile"] = harness.backward(harness.compiled(self.formula), inputs, self.dy)
            peers["liger"] = self.liger_bwd()
        except Exception as error:  # a peer's own limits are its own
            print(f"{self.name} bwd: a peer was not run: {error!r:.200}")
        return peers

    def liger(self, way: str) -> Callable[..., Any]:
        module = importlib.import_module(f"liger_kernel.ops.{self.name}")
        return getattr(module, f"{self.name}_{way}")

    def liger_fwd(self) -> Any:
        more = () if self.centres else (0.0, "llama", None)
        return self.liger("forward")(self.x, *self.params, EPS, *more)

    def liger_bwd(self) -> Callable[[], Any]:
        _, x, *rest = self.liger_fwd()
        if self.centres:
            more = rest[:2]  # mean, rstd
        else:
            rstd, block, warps, mode = rest
            more = [rstd, 0.0, mode, block, warps, False, None]
        return functools.partial(self.liger("backward"), self.dy, x, *self.params, *more)

    def fp8_peers(self, transposed: bool) -> Calls:
        def formula(x: torch.Tensor, *params: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = self.formula(x.float(), *(p.float() for p in params))
            codes = (y * self.one).clamp(-448, 448).to(FP8)
            return codes, y.abs().amax(), *([codes.t().contiguous()] if transposed else [])

        compiled = harness.compiled(formula)
        return {"compile": lambda: compiled(self.x, *self.params)}

    def functions(self, with_peers: bool) -> list[tuple[str, int, Callable[[], Any], Calls]]:
        """(function, bytes of an element, call, peers)."""
        dx, given = (self.dy, self.x, *self.rest), (self.x, *self.params, EPS)
        residual = self.residual
        calls = [
            ("fwd", 4, lambda: self.fwd(*given), self.fwd_peers),
            ("bwd", 6, lambda: self.bwd(*dx), self.bwd_peers),
            ("fwd to FP8 rowwise", 3, lambda: self.quantize(columnwise=False),
             lambda: self.fp8_peers(False)),
            ("fwd to FP8 both", 4, self.quantize, lambda: self.fp8_peers(True)),
            ("residual fwd", 8, lambda: self.fwd(*given, residual=residual), dict),
            ("residual bwd", 8, lambda: self.bwd(*dx, d_residual=residual), dict),
            ("residual fwd to FP8 both", 8, lambda: self.quantize(residual=residual), dict),
        ]  # fmt: skip
        return [(*rest, peers() if with_peers else {}) for *rest, peers in calls]


@harness.case("layer_norm", [layer_norm] * len(SHAPES), SHAPES)
@harness.case("rms_norm", [rms_norm] * len(SHAPES), SHAPES)
def rows(op: ModuleType, shape: tuple[int, int]) -> Iterator[harness.Row]:
    case = Case(op, shape)
    for function, element_bytes, call, peers in case.functions(shape[1] in (3584, 4096, 16384)):
        num_bytes = case.x.numel() * element_bytes
        yield harness.measure(f"{case.name} {function}", shape, num_bytes, call, peers, repeats=20)


@harness.case("layer_norm", [layer_norm])
@harness.case("rms_norm", [rms_norm])
def small_rows(op: ModuleType) -> Iterator[harness.Row]:
    small = Case(op, (64, 4096))
    for function, _, call, _ in small.functions(with_peers=False):
        two = "bwd" in function or "both" in function  # few tiles: statistics first
        launches = "two launches" if two else "one launch"
        name = f"{small.name} {function}, graph, warm, {launches}"
        yield harness.in_graph(name, call, "64x4096")
