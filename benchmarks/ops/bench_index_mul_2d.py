"""index_mul_2d: bandwidth of forward, backward and the second backward against torch's indexing.

Bytes counted for each of e * d elements of s bytes: forward 3 s (read both, write), backward 6 s
(read dout, in2 and the row of in1, write din2, add to din1), second backward 9 s. Backward includes
the sort of the index. torch's peers go through autograd, whose sums have no fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator

import harness
import torch

from apex_te.ops.index_mul_2d import index_mul_2d_bwd, index_mul_2d_fwd, reference

# rows of in1, rows of in2, columns: edges of atoms
SHAPES = [
    (50_000, 1_000_000, 64),
    (200_000, 1_000_000, 128),
    (5_000, 100_000, 64),
    (2_000, 500_000, 256),
]


@harness.case("index_mul_2d", SHAPES)
def rows(shape: tuple[int, int, int]) -> Iterator[harness.Row]:
    num_rows, places, cols = shape
    index = torch.randint(num_rows, (places,), device="cuda")
    for dtype in (torch.float32, torch.float16):
        in1, d1 = (harness.normal(num_rows, cols).to(dtype) for _ in range(2))
        in2, dout, d2 = (harness.normal(places, cols).to(dtype) for _ in range(3))
        size = in2.numel() * in2.element_size()
        name = f"{harness.text_of(shape)} {str(dtype).removeprefix('torch.')}"
        out, din1 = torch.empty_like(in2), torch.zeros_like(in1)
        leaves = [t.clone().requires_grad_() for t in (in1, in2, dout)]
        made = reference(*leaves[:2], index)
        grads = torch.autograd.grad(made, leaves[:2], leaves[2], create_graph=True)

        def second() -> None:
            index_mul_2d_fwd(d1, in2, index, in1, d2, out=out)  # noqa: B023
            index_mul_2d_bwd(dout, d1, d2, index, din1=din1, out=out)  # noqa: B023

        yield harness.measure(
            "index_mul_2d fwd", name, 3 * size,
            lambda: index_mul_2d_fwd(in1, in2, index, out=out),  # noqa: B023
            harness.formula_peers(reference, in1, in2, index),
        )  # fmt: skip
        yield harness.measure(
            "index_mul_2d bwd", name, 6 * size,
            lambda: index_mul_2d_bwd(dout, in1, in2, index, din1=din1, out=out),  # noqa: B023
            {"torch": lambda: torch.autograd.grad(made, leaves[:2], dout, retain_graph=True)},  # noqa: B023
        )  # fmt: skip
        yield harness.measure(
            "index_mul_2d bwd twice", name, 9 * size, second,
            {"torch": lambda: torch.autograd.grad(grads, leaves, (d1, d2), retain_graph=True)},  # noqa: B023
        )  # fmt: skip
