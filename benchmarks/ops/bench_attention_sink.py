"""attention_sink: bandwidth of the pass that adds sinks to attention's output, and of its gradient.

Bytes counted, bf16 and d elements a query: forward 4 d + 8 (read and write the output, read the
log-sum-exp, write the total), backward 4 d + 4 (read the output, its gradient and the total). The
shapes are the outputs of gpt-oss's layers (64 heads of 64) and of heads of 128, in the memory order
of sbhd, bshd and bhsd.
"""

from __future__ import annotations

from collections.abc import Iterator

import harness
import torch

from apex_te.ops.attention_sink import attention_sink_bwd, attention_sink_fwd, reference

# [b, h, s, d], and the order of these in memory
CASES = [
    ((2, 64, 4096, 64), "bshd"), ((2, 32, 4096, 128), "bshd"), ((2, 32, 4096, 128), "sbhd"),
    ((2, 32, 4096, 128), "bhsd"), ((1, 128, 4096, 128), "sbhd"), ((2, 16, 4096, 256), "bshd"),
]  # fmt: skip


def gradient(
    dout: torch.Tensor, out: torch.Tensor, total: torch.Tensor, sink: torch.Tensor
) -> torch.Tensor:
    """The formula of backward."""
    delta = (dout.float() * out.float()).sum(-1)
    return -((sink[:, None] - total).exp() * delta).sum((0, 2))


def heads(shape: tuple[int, ...], layout: str) -> torch.Tensor:
    """A tensor [b, h, s, d] in the memory order of ``layout``."""
    sizes = dict(zip("bhsd", shape, strict=True))
    x = harness.normal(*(sizes[letter] for letter in layout))
    return x.permute([layout.index(letter) for letter in "bhsd"])


@harness.case("attention_sink")
def rows() -> Iterator[harness.Row]:
    for shape, layout in CASES:
        out, dout, lse = heads(shape, layout), heads(shape, layout), torch.randn(shape[:3]).cuda()
        sink = torch.randn(shape[1]).cuda()
        # A sink far below leaves the output as it is, call after call.
        fwd, low = lse, sink - 100.0
        name = f"{harness.text_of(shape)} {layout}"
        peers = harness.formula_peers(reference, out, fwd, low)
        yield harness.measure(
            "attention_sink fwd", name, lse.numel() * (4 * shape[3] + 8),
            lambda: attention_sink_fwd(out, fwd, low, out=out), peers,  # noqa: B023
        )  # fmt: skip
        args = (dout, out, lse, sink)
        yield harness.measure(
            "attention_sink bwd", name, lse.numel() * (4 * shape[3] + 4),
            lambda: attention_sink_bwd(*args), harness.formula_peers(gradient, *args),  # noqa: B023
        )  # fmt: skip
