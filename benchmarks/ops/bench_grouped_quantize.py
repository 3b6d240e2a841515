"""grouped_quantize: 8 groups of rows, their sizes on the device, against a cast for each group.

Bytes counted: 4 an element for bf16 to both outputs (read 2, write 1 + 1), 3 for rowwise only, 2
for the amax values alone; of the weights the same. The peer runs cast_transpose for each group,
whose sizes the host knows; its columnwise copies do not lie in one matrix, as grouped products need
them.

Amax values alone take the same tiles (75% of a copy of the bytes read), where the other kernels of
amax values go through rows as one long vector: a group's rows would have to be found for each part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import harness
import torch

from apex_te.ops import grouped_quantize as op
from apex_te.ops.cast_transpose import cast_transpose

FP8 = torch.float8_e4m3fn
SHARES = [6, 2, 4, 5, 3, 4, 1, 7]
SHAPES = [(32768, 7168), (32768, 2048), (16384, 7168)]
# rowwise, columnwise
OUTPUTS = {
    "both": (True, True), "rowwise": (True, False), "amax": (False, False),
    "columnwise": (False, True),
}  # fmt: skip


Parts = Sequence[torch.Tensor]


def row(
    function: str, shape: str, outputs: str, ours: Callable[..., Any], parts: Parts
) -> harness.Row:
    """Measures ``ours`` against a cast of each of ``parts``."""
    rowwise, columnwise = OUTPUTS[outputs]
    scale, amax = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
    wanted = {"rowwise": rowwise, "columnwise": columnwise}

    def casts() -> None:
        for i, part in enumerate(parts):
            cast_transpose(part, scale[i], FP8, amax=amax[i], **wanted)

    num_bytes = sum(part.numel() for part in parts) * (2 + rowwise + columnwise)
    call = functools.partial(ours, scale, FP8, amax=amax, **wanted)
    peers = {"casts": casts}
    return harness.measure(function, shape, num_bytes, call, peers, repeats=20, outputs=outputs)


@harness.case("grouped_quantize")
def rows() -> Iterator[harness.Row]:
    for shape in SHAPES:
        x = harness.normal(*shape)
        splits = [share * shape[0] // sum(SHARES) for share in SHARES]
        for outputs in ("both", "rowwise", "amax"):
            groups = op.groups_of(torch.tensor(splits, device="cuda"), len(x))
            ours = functools.partial(op.quantize_groups, x, groups)
            yield row("rows", harness.text_of(shape), outputs, ours, x.split(splits))
    for outputs in OUTPUTS:
        weights = [harness.normal(2048, 7168) for _ in range(8)]
        ours = functools.partial(op.quantize_matrices, weights)
        yield row("matrices", "8x2048x7168", outputs, ours, weights)
    x = harness.normal(32768, 7168)
    splits = torch.tensor([share * 512 for share in SHARES], device="cuda")
    groups, bias = op.groups_of(splits, len(x)), harness.normal(8, 7168)
    calls = {
        "offsets": (0, lambda: op.groups_of(splits, len(x))),
        "column sums": (2, lambda: op.column_sums(x, groups)),
        "finish, bias": (4, lambda: op.finish_rows(x, groups, bias)),
        "finish, half of it padding": (1, lambda: op.finish_rows(x, groups)),
    }
    for name, (each, call) in calls.items():
        times = harness.kernel_us(call, repeats=20)
        if each:
            part = 0.5 if "column" in name else 1  # rows behind the last group are not read
            times["TB/s"] = harness.terabytes_per_second(int(x.numel() * each * part), times["us"])
        yield {"function": name, "shape": "32768x7168", **times}
