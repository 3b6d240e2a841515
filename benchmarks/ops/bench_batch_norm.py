"""batch_norm: bandwidth of its steps in both memory orders, and of whole forward and backward.

Bytes counted, an element for 16-bit data: statistics 2 (read x), forward 4 (read x, write y), with
residual and ReLU 6, sums 4 (read dy and x), backward 6 (read dy and x, write dx), with a residual
10; a whole forward 6, a whole backward 10. Shapes of ResNet-50's layers for 256 images, and others.

Tried: clusters that hold channels in shared memory, and so read each element once, take 1.3 to 3.8
times as long as three kernels (256x1024x14x14 in channels_last: 246 against 101 us, backward 527
against 140).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import harness
import torch
from torch.nn import functional as F

from apex_te.ops import batch_norm as op

# [n, c, h, w]
SHAPES = [
    (256, 64, 112, 112), (256, 64, 56, 56), (256, 256, 56, 56), (256, 128, 28, 28),
    (256, 512, 28, 28), (256, 1024, 14, 14), (256, 512, 7, 7), (256, 2048, 7, 7), (32, 256, 14, 14),
    (2, 64, 512, 512),
]  # fmt: skip
EPS = 1e-5


def images(shape: tuple[int, ...], memory: torch.memory_format, dtype: torch.dtype) -> torch.Tensor:
    return harness.normal(*shape).to(dtype).contiguous(memory_format=memory)


@harness.case(
    "batch_norm", (torch.channels_last, torch.contiguous_format) * 2,
    (torch.float16, torch.float16, torch.float32, torch.float32),
)  # fmt: skip
def rows(memory: torch.memory_format, dtype: torch.dtype) -> Iterator[harness.Row]:
    layout = "channels_last" if memory is torch.channels_last else "channels first"
    layout += "" if dtype is torch.float16 else " fp32"
    for shape in SHAPES:
        yield from of_shape(shape, layout, memory, dtype)


def of_shape(
    shape: tuple[int, ...], layout: str, memory: torch.memory_format, dtype: torch.dtype
) -> Iterator[harness.Row]:
    x, z, dy = (images(shape, memory, dtype) for _ in range(3))
    name, size = f"{harness.text_of(shape)} {layout}", x.numel() * x.element_size()
    weight, bias = torch.rand(shape[1]).cuda(), torch.randn(shape[1]).cuda()
    count = torch.tensor([x.numel() // shape[1]], dtype=torch.int32).cuda()

    mean, var = op.batch_norm_stats(x)
    stats = op.batch_norm_combine(mean[None], var[None], count, EPS)
    own = (stats.mean, stats.inv_std, weight)
    sums = op.batch_norm_reduce(dy, x, *own, bias)
    last = (dy, x, *own, *sums[:2], count, bias)

    def with_residual(*given: torch.Tensor) -> torch.Tensor:
        data, residual = given
        normal = F.batch_norm(data, stats.mean, var, weight, bias, eps=EPS)
        return (normal + residual).relu()

    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    y = F.batch_norm(leaves[0], None, None, leaves[1], leaves[2], training=True, eps=EPS)
    stat = torch.batch_norm_stats(x, EPS)
    flags = (True, True, True)
    steps = {
        "stats": (1, lambda: op.batch_norm_stats(x), lambda: torch.batch_norm_stats(x, EPS)),
        "fwd": (
            2, lambda: op.batch_norm_fwd(x, *own, bias),
            lambda: torch.batch_norm_elemt(x, weight, bias, *stat, EPS),
        ),
        "reduce": (
            2, lambda: op.batch_norm_reduce(dy, x, *own, bias),
            lambda: torch.batch_norm_backward_reduce(dy, x, *stat, weight, *flags),
        ),
        "bwd": (
            3, lambda: op.batch_norm_bwd(dy, x, *own, *sums[:2], count),
            lambda: torch.batch_norm_backward_elemt(dy, x, *stat, weight, *sums[:2], count),
        ),
        "whole fwd": (
            3, lambda: op.batch_norm_train_fwd(x, weight, bias, EPS),
            lambda: F.batch_norm(x, None, None, weight, bias, training=True, eps=EPS),
        ),
        "whole bwd": (
            5, lambda: op.batch_norm_train_bwd(dy, x, *own, bias),
            harness.gradients(y, leaves, dy),
        ),
        "fwd with z and relu": (
            3, lambda: op.batch_norm_fwd(x, *own, bias, z=z, relu=True),
            partial(with_residual, x, z),
        ),
        "bwd with relu": (3, partial(op.batch_norm_bwd, *last, relu=True), None),
        "bwd with z and relu": (
            5, partial(op.batch_norm_bwd, *last, z=z, relu=True, with_dz=True), None
        ),
    }  # fmt: skip
    for step, (passes, call, peer) in steps.items():
        peers = {} if peer is None else {"torch": peer}
        if step == "fwd with z and relu":
            peers |= harness.compile_peer(with_residual, x, z)
        yield harness.measure(f"batch_norm {step}", name, passes * size, call, peers)
