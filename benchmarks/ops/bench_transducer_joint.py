"""transducer_joint: bandwidth of the sums and of their gradients against the plain formula.

Bytes counted for each of B * T * U * H elements of s bytes: forward s (write), with ReLU and
dropout s + 1 (the mask, too), backward s or s + 1 (one read for both gradients). All samples have
all frames and places. The formula's peer has no lengths.
"""

from __future__ import annotations

from collections.abc import Iterator

import harness
import torch

from apex_te.ops.transducer_joint import transducer_joint_bwd, transducer_joint_fwd

SHAPES = [(16, 200, 60, 512), (8, 400, 100, 640), (32, 128, 30, 1024), (4, 64, 20, 512)]


def formula(f: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return f[:, :, None] + g[:, None]


def masked(f: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(formula(f, g).relu(), 0.1)


@harness.case("transducer_joint", SHAPES)
def rows(shape: tuple[int, int, int, int]) -> Iterator[harness.Row]:
    batch, frames, places, cols = shape
    f_len, g_len = (
        torch.full((batch,), n, dtype=torch.int32, device="cuda") for n in (frames, places)
    )
    seed = torch.tensor([1], device="cuda")
    for dtype in (torch.bfloat16, torch.float32):
        f, g = (harness.normal(batch, n, cols).to(dtype) for n in (frames, places))
        numel, size = batch * frames * places * cols, f.element_size()
        name = f"{harness.text_of(shape)} {str(dtype).removeprefix('torch.')}"
        args, leaves = (f, g, f_len, g_len), [t.clone().requires_grad_() for t in (f, g)]
        random = {"relu": True, "p": 0.1, "seed": seed}
        yield harness.measure(
            "transducer_joint fwd", name, numel * size,
            lambda: transducer_joint_fwd(*args, with_mask=False),  # noqa: B023
            harness.formula_peers(formula, f, g),
        )  # fmt: skip
        yield harness.measure(
            "fwd, ReLU and dropout", name, numel * (size + 1),
            lambda: transducer_joint_fwd(*args, **random),  # noqa: B023
            harness.formula_peers(masked, f, g),
        )  # fmt: skip
        grad, mask = transducer_joint_fwd(*args, **random)
        for label, kept, function in (("bwd", None, formula), ("bwd, masked", mask, masked)):
            out = function(*leaves)
            yield harness.measure(
                f"transducer_joint {label}", name, numel * (size + (kept is not None)),
                lambda: transducer_joint_bwd(grad, kept, f_len, g_len, None, frames, places),  # noqa: B023
                {"torch": lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)},  # noqa: B023
            )  # fmt: skip
