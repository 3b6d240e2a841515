"""jit_op: time against the plain formula, and bandwidth.

Bytes counted: forward, read x and write y; backward, read dy and x and write dx.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import harness
import torch

from apex_te.ops import jit_op as op

# if cuda
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(16384, 4096), (512, 4096)] if DEVICE == "cuda" else [(1024, 4096)]
# end
# if cpu
DEVICE = "cpu"
SHAPES = [(1024, 4096)]
# end


def measure(
    function: str,
    x: torch.Tensor,
    num_bytes: int,
    call: Callable[[], Any],
    formula: Callable[[], Any],
) -> dict[str, Any]:
    shape = "x".join(map(str, x.shape))
    # if cuda
    if DEVICE == "cuda":
        return harness.measure(function, shape, num_bytes, call, {"torch": formula})
    # end
    us, plain = (harness.host_us(each, calls=5, warmup=2) for each in (call, formula))
    return {
        "function": function,
        "shape": shape,
        "us": us,
        "GB/s": num_bytes / us / 1e3,
        "torch us": plain,
        "over torch": plain / us,
    }


@harness.case("jit_op")
def rows() -> Iterator[harness.Row]:
    for shape in SHAPES:
        x, dy = (torch.randn(shape, device=DEVICE).bfloat16() for _ in range(2))
        leaf = x.clone().requires_grad_()
        y = op.reference(leaf)
        gradient = lambda: torch.autograd.grad(y, leaf, dy, retain_graph=True)  # noqa: B023, E731
        plain = lambda: op.reference(x)  # noqa: B023, E731
        fwd = lambda: op.jit_op_fwd(x)  # noqa: B023, E731
        bwd = lambda: op.jit_op_bwd(dy, x)  # noqa: B023, E731
        size = x.numel() * x.element_size()
        yield measure("fwd", x, 2 * size, fwd, plain)
        yield measure("bwd", x, 3 * size, bwd, gradient)
