"""transducer_loss: forward and backward against log_softmax and a recursion by diagonals in torch.

Bytes counted: forward, of rows of V logits of s bytes, V s + 20 a row (read the logits, write and
read two log-probabilities, write alpha, beta and the log of the sum); backward 2 V s + 8. Forward
is bounded by its T + U dependent steps where V is small. All samples have all frames and labels.
The peer is the formula of a step for all samples and places of a diagonal at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import harness
import torch

from apex_te.ops.transducer_loss import transducer_loss

# B, T, U, V
SHAPES = [(16, 200, 60, 29), (8, 400, 100, 1024), (32, 128, 30, 512), (16, 200, 60, 4096)]


def by_diagonals(x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """The loss of samples that all have T frames and U - 1 labels."""
    logs = x.float().log_softmax(-1)
    batch, frames, places, _ = logs.shape
    blank = logs[..., 0]
    index = label.long()[:, None, :, None].expand(-1, frames, -1, 1)
    labels = logs[:, :, :-1].gather(-1, index)[..., 0]
    place = torch.arange(places, device=x.device)
    alpha = blank.new_full((batch, places), -torch.inf)
    alpha[:, 0] = 0.0
    for diagonal in range(1, frames + places - 1):
        t = diagonal - place
        down = alpha + blank[:, (t - 1).clamp(0, frames - 1), place]
        down = down.masked_fill((t < 1) | (t >= frames), -torch.inf)
        right = alpha[:, :-1] + labels[:, t[1:].clamp(0, frames - 1), place[:-1]]
        right = right.masked_fill((t[1:] < 0) | (t[1:] >= frames), -torch.inf)
        right = torch.nn.functional.pad(right, (1, 0), value=-torch.inf)
        alpha = torch.logaddexp(down, right)
    return -(alpha[:, -1] + blank[:, -1, -1])


@harness.case("transducer_loss", SHAPES)
def rows(shape: tuple[int, int, int, int]) -> Iterator[harness.Row]:
    batch, frames, places, symbols = shape
    label = torch.randint(1, symbols, (batch, places - 1), device="cuda").int()
    f_len, y_len = (
        torch.full((batch,), n, dtype=torch.int32, device="cuda") for n in (frames, places - 1)
    )
    for dtype in (torch.bfloat16, torch.float32):
        x = harness.normal(*shape).to(dtype).requires_grad_()
        num_rows, size = x[..., 0].numel(), symbols * x.element_size()
        name = f"{harness.text_of(shape)} {str(dtype).removeprefix('torch.')}"
        loss, other = transducer_loss(x, label, f_len, y_len), by_diagonals(x, label)
        ones = torch.ones_like(loss)
        yield harness.measure(
            "transducer_loss fwd", name, num_rows * (size + 20),
            lambda: transducer_loss(x.detach(), label, f_len, y_len),  # noqa: B023
            {"torch": lambda: by_diagonals(x.detach(), label)},  # noqa: B023
        )  # fmt: skip
        yield harness.measure(
            "transducer_loss bwd", name, num_rows * (2 * size + 8),
            lambda: torch.autograd.grad(loss, x, ones, retain_graph=True),  # noqa: B023
            {"torch": lambda: torch.autograd.grad(other, x, ones.float(), retain_graph=True)},  # noqa: B023
        )  # fmt: skip
