"""focal_loss: bandwidth of the loss, of its gradient, and of both in one pass.

Bytes counted an element of s bytes: the loss alone s (read the logits), with the gradient 2 s, the
gradient alone 2 s, the scaling in place 2 s. Shapes are the anchors of RetinaNet's five levels, of
800x1333 pixels, times images and classes; 90 classes are not a multiple of a vector.
"""

from __future__ import annotations

from collections.abc import Iterator

import harness
import torch

from apex_te.ops.focal_loss import focal_loss_bwd, focal_loss_fwd, focal_loss_scale, reference

ANCHORS = 201_600
SHAPES = [(ANCHORS, 80), (ANCHORS, 96), (8 * ANCHORS, 80), (8 * ANCHORS, 90), (4096, 80)]


@harness.case("focal_loss", SHAPES)
def rows(shape: tuple[int, int]) -> Iterator[harness.Row]:
    target = torch.randint(-2, shape[1], shape[:1], device="cuda")
    count, factor = torch.tensor([100.0], device="cuda"), torch.tensor(2.0, device="cuda")
    for dtype in (torch.bfloat16, torch.float32):
        logits = (harness.normal(*shape).float() * 2 - 4).to(dtype)
        leaf, size = logits.clone().requires_grad_(), logits.numel() * logits.element_size()
        _, made = focal_loss_fwd(logits, target, count)
        name = f"{harness.text_of(shape)} {str(dtype).removeprefix('torch.')}"
        args = (logits, target, count)
        yield harness.measure(
            "focal_loss", name, size, lambda: focal_loss_fwd(*args, with_grad=False),  # noqa: B023
            harness.formula_peers(reference, *args),
        )  # fmt: skip
        yield harness.measure("with gradient", name, 2 * size, lambda: focal_loss_fwd(*args))  # noqa: B023
        out = reference(leaf, target, count)
        yield harness.measure(
            "focal_loss_bwd", name, 2 * size, lambda: focal_loss_bwd(*args, factor),  # noqa: B023
            {"torch": lambda: torch.autograd.grad(out, leaf, out.new_ones(()), retain_graph=True)},  # noqa: B023
        )  # fmt: skip
        yield harness.measure(
            "focal_loss_scale", name, 2 * size, lambda: focal_loss_scale(made, count, count),  # noqa: B023
            {"torch": lambda: made.mul_(1.0)},  # noqa: B023
        )  # fmt: skip
