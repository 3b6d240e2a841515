"""Measurements of bench_layer_norm and bench_rms_norm: each function of a norm, with its peers.

What did not help on an H200 (16384 x 4096, bf16, TB/s over the floor's bytes):

- Rows in groups of 4 warps whose statistics are exchanged behind a barrier a row ahead, all of it
  read from shared memory: layer_norm forward 2.3 and to FP8 rowwise 1.7, where a warp that has its
  row in registers gets 3.5 and 3.3. Parts of 4 KB or 2 KB in 16 to 32 warps: 3.1 to 3.4 and 2.3 to
  2.7.
- An exchange of statistics between blocks through the cluster's barrier, which waits for all
  stores before it: a cluster for each row of 4096 ran at a fifth of the speed.
- Both FP8 layouts from 8 x 8 codes of a thread in a cluster that holds 32 to 128 rows: 2.1 to 2.6
  (rms_norm 2.6 to 2.9). Two blocks a multiprocessor with 32 rows each, of 2 blocks a row: as one
  block; with 64 rows of 4 blocks a row: 2.3 (rms_norm 3.0), where 2 blocks a row reach 3.2.
- Streaming rms_norm's forward in x's dtype at 4096 columns: 3.7, a block for each row 3.8.
- Rows of a persistent grid, through registers or 2 to 3 stages of shared memory: layer_norm 2.9 to
  3.5, rms_norm 3.3 to 3.6; blocks of 2 rows 3.7, of 8 rows 3.4 and 3.5. To FP8 rms_norm 2.9 to 3.5,
  blocks of 4 rows 3.5; layer_norm 2.3 to 2.9 and 3.0, where a warp a row gets 3.2. Those warps in 2
  to 8 rounds of blocks: 3.1 to 2.5.
- Backward, layer_norm: 768 threads 3.4 to 3.5 (and 2.6 if they hold dy and x between both passes:
  spills), 640 whose slots share a barrier 3.5, which have one each and hold both 3.6; 8 columns of
  a thread instead of 16: 2.4 (rms_norm 2.8). rms_norm with a barrier for each slot: 3.6 instead of
  3.7 (8192 columns: 3.6 instead of 3.5).
- To both FP8 layouts, tiles of 32 to 56 rows so that all multiprocessors get the same number:
  7168 x 2112 took 29.7 us instead of the 23.7 of 64 rows; a copy of the bytes 21.5. Four blocks a
  row with 64 rows at 7168 columns: rms_norm 0.83 instead of 0.79 of a copy, layer_norm slower.
- To both FP8 layouts, patches of 8 x 8 codes of a thread, persistent, the next tile on its way to
  shared memory (norm/fwd_patch_cuda.h, for narrow rows), in 1 to 16 blocks a row: from 2112 to
  16384 columns at best 0.63 to 0.73 (layer_norm) and 0.75 to 0.81 of a copy, where tiles of codes
  in shared memory get 0.64 to 0.78 and 0.73 to 0.83. With 64 rows a tile 0.47 to 0.65 and 0.61 to
  0.76; with statistics a tile ahead of the stores (3 tiles in shared memory) 0.51 to 0.62 and 0.72
  to 0.80. With a residual and 65536 x 1024 0.77 and 0.80, of tiles 0.84 and 0.86.
- In tiles of codes, weights read from shared memory a vector ahead, and no question for each vector
  whether there is a weight: within 2% of what it was. layer_norm issues 14 instructions an element
  against 8.5 of rms_norm, and is that much slower: 0.70 against 0.81 of a copy at 5120 columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import harness
import torch
from torch.nn import functional as F

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


def run(op: ModuleType) -> None:
    """Measures an op and writes its results file."""
    harness.run(op.__name__.rpartition(".")[2], rows(op))


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
