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

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

from apex_te.ops.bias_dropout_add import bias_dropout_add, bias_dropout_add_bwd

P = 0.1
SHAPES = [(16384, 4096), (16384, 14336), (4096, 4096), (16384, 3584)]


def formula(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, p: float) -> torch.Tensor:
    return residual + F.dropout(x + bias, p)


def gradients(function: Any, leaves: list[torch.Tensor], dout: torch.Tensor) -> Any:
    """A call that runs the backward of one forward again and again."""
    out = function(*leaves, P)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def main() -> None:
    rows = []
    clock = harness.sm_clock_mhz()
    seed = torch.tensor([1], device="cuda")
    both = {"x_dtype": torch.bfloat16, "bias_dtype": torch.bfloat16}
    for shape in SHAPES:
        x, residual, dout = (torch.randn(shape, device="cuda").bfloat16() for _ in range(3))
        bias = torch.randn(shape[1], device="cuda").bfloat16()
        leaves = [t.clone().requires_grad_() for t in (x, bias, residual)]
        compiled = harness.compiled(formula)

        def add(function: str, num_bytes: int, call: Any, peers: Any = None) -> None:
            name = "x".join(map(str, shape))  # noqa: B023
            rows.append(harness.measure(function, name, num_bytes * x.numel(), call, peers))  # noqa: B023

        peers = {"torch": lambda: formula(*args), "compile": lambda: compiled(*args)}  # noqa: B023
        args = (x, bias, residual, P)
        add("bias_dropout_add fwd", 6, lambda: bias_dropout_add(*args), peers)  # noqa: B023
        peers = {
            "torch": gradients(formula, leaves, dout),
            "compile": gradients(compiled, leaves, dout),
        }
        bwd = lambda **wanted: bias_dropout_add_bwd(dout, seed, P, **wanted)  # noqa: B023, E731
        add("bias_dropout_add bwd, dx and dbias", 4, lambda: bwd(**both), peers)  # noqa: B023
        add("bias_dropout_add bwd, dx", 4, lambda: bwd(x_dtype=torch.bfloat16))  # noqa: B023
        if shape != SHAPES[0]:
            continue
        add("fwd, seed given", 6, lambda: bias_dropout_add(*args, seed=seed))  # noqa: B023
        add("fwd, p = 0", 6, lambda: bias_dropout_add(*args[:3], 0.0))  # noqa: B023
        wide = residual.float()
        add("fwd, float32 residual", 10, lambda: bias_dropout_add(x, bias, wide, P))  # noqa: B023
    x, residual = (torch.randn(64, 4096, device="cuda").bfloat16() for _ in range(2))
    bias = torch.randn(4096, device="cuda").bfloat16()
    small = {
        "fwd": lambda: bias_dropout_add(x, bias, residual, P),
        "fwd, seed given": lambda: bias_dropout_add(x, bias, residual, P, seed=seed),
        "bwd, dx and dbias": lambda: bias_dropout_add_bwd(x, seed, P, **both),
    }
    for name, call in small.items():
        function = f"bias_dropout_add {name}, graph, warm"
        rows.append({"function": function, "shape": "64x4096", "us": harness.graph_us(call)})
    harness.report("bias_dropout_add", rows, sm_clock_mhz=f"{clock} to {harness.sm_clock_mhz()}")


if __name__ == "__main__":
    main()
