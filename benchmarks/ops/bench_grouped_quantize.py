"""grouped_quantize: 8 groups of rows, their sizes on the device, against a cast for each group.

Bytes counted: 4 an element for bf16 to both outputs (read 2, write 1 + 1), 3 for rowwise only, 2
for the amax values alone; of the weights the same. The peer runs cast_transpose for each group,
whose sizes the host knows; its columnwise copies do not lie in one matrix, as grouped products need
them.

Amax values alone take the same tiles (75% of a copy of the bytes read), where the other kernels of
amax values go through rows as one long vector: a group's rows would have to be found for each part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

from apex_te.ops import grouped_quantize as op
from apex_te.ops.cast_transpose import cast_transpose

FP8 = torch.float8_e4m3fn
SHARES = [6, 2, 4, 5, 3, 4, 1, 7]
SHAPES = [(32768, 7168), (32768, 2048), (16384, 7168)]
OUTPUTS = {"both": (True, True), "rowwise": (True, False), "amax": (False, False)}


def of_rows(x: torch.Tensor, splits: list[int], rowwise: bool, columnwise: bool) -> list[Callable]:
    """Ours and the peer."""
    groups = op.groups_of(torch.tensor(splits, device="cuda"), len(x))
    scale, amax = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")

    def ours() -> Any:
        return op.quantize_groups(
            x, groups, scale, FP8, rowwise=rowwise, columnwise=columnwise, amax=amax
        )

    def casts() -> Any:
        for i, part in enumerate(x.split(splits)):
            cast_transpose(
                part, scale[i], FP8, rowwise=rowwise, columnwise=columnwise, amax=amax[i]
            )

    return [ours, casts]


def of_matrices(shape: tuple[int, int], rowwise: bool, columnwise: bool) -> list[Callable]:
    """Returns the calls that quantize a weight of this shape for each group."""
    weights = [torch.randn(shape, device="cuda").bfloat16() for _ in range(8)]
    scale, amax = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")

    def ours() -> Any:
        return op.quantize_matrices(
            weights, scale, FP8, rowwise=rowwise, columnwise=columnwise, amax=amax
        )

    def casts() -> Any:
        for i, weight in enumerate(weights):
            cast_transpose(
                weight, scale[i], FP8, rowwise=rowwise, columnwise=columnwise, amax=amax[i]
            )

    return [ours, casts]


def main() -> None:
    rows = []
    clock = harness.sm_clock_mhz()
    for shape in SHAPES:
        x = torch.randn(shape, device="cuda").bfloat16()
        splits = [share * shape[0] // sum(SHARES) for share in SHARES]
        for name, (rowwise, columnwise) in OUTPUTS.items():
            ours, casts = of_rows(x, splits, rowwise, columnwise)
            num_bytes = x.numel() * (2 + rowwise + columnwise)
            label = "x".join(map(str, shape))
            peers = {"casts": casts}
            rows.append(
                harness.measure("rows", label, num_bytes, ours, peers, repeats=20, outputs=name)
            )
    for name, (rowwise, columnwise) in {**OUTPUTS, "columnwise": (False, True)}.items():
        ours, casts = of_matrices((2048, 7168), rowwise, columnwise)
        num_bytes = 8 * 2048 * 7168 * (2 + rowwise + columnwise)
        peers = {"casts": casts}
        label = "8x2048x7168"
        rows.append(
            harness.measure("matrices", label, num_bytes, ours, peers, repeats=20, outputs=name)
        )
    x = torch.randn(32768, 7168, device="cuda").bfloat16()
    splits = torch.tensor([share * 512 for share in SHARES], device="cuda")
    groups, bias = op.groups_of(splits, len(x)), torch.randn(8, 7168, device="cuda").bfloat16()
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
        rows.append({"function": name, "shape": "32768x7168", **times})
    harness.report("grouped_quantize", rows, sm_clock_mhz=f"{clock} to {harness.sm_clock_mhz()}")


if __name__ == "__main__":
    main()
