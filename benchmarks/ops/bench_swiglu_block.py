"""swiglu_block: a gated activation and its cast in 1x128 blocks in one kernel, against the two ops.

Bytes counted for each element of the [M, F] output: forward 6 (read gate and up, write two FP8
copies), backward 10 (read both inputs and the gradient, write two copies of two gradients); with
each copy 4 more for 128 elements. The two ops write and read a bf16 result between them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

from apex_te.ops.block_quantize import block_quantize
from apex_te.ops.swiglu import swiglu_bwd, swiglu_fwd
from apex_te.ops.swiglu_block import swiglu_bwd_block, swiglu_fwd_block

SHAPES = [(8192, 14336), (16384, 14336), (16384, 3584), (8190, 3584), (16384, 4095)]
E4M3 = torch.float8_e4m3fn


def rows_of(shape: tuple[int, int]) -> list[dict[str, Any]]:
    """Measures the forward and the backward at one shape [M, F], both layouts, padded columns."""
    tokens, features = shape
    x = torch.randn(tokens, 2 * features, device="cuda").bfloat16()
    grad = torch.randn(tokens, features, device="cuda").bfloat16()
    name, pad = f"{tokens}x{features}", {"pad_columnwise": True}
    scales = 2 * 4 / 128
    calls: dict[str, tuple[float, Callable[[], Any], Callable[[], Any]]] = {
        "swiglu_fwd_block, both": (
            6 + scales,
            lambda: swiglu_fwd_block(x, None, E4M3, **pad),
            lambda: block_quantize(swiglu_fwd(x), E4M3, **pad),
        ),
        "swiglu_bwd_block, both": (
            10 + 2 * scales,
            lambda: swiglu_bwd_block(grad, x, None, E4M3, **pad),
            lambda: block_quantize(swiglu_bwd(grad, x).input, E4M3, **pad),
        ),
    }
    return [
        harness.measure(
            function,
            name,
            int(num_bytes * tokens * features),
            fused,
            {"two ops": apart},
            repeats=20,
        )
        for function, (num_bytes, fused, apart) in calls.items()
    ]


def main() -> None:
    clock = harness.sm_clock_mhz()
    rows = [row for shape in SHAPES for row in rows_of(shape)]
    harness.report("swiglu_block", rows, sm_clock_mhz=f"{clock} to {harness.sm_clock_mhz()}")


if __name__ == "__main__":
    main()
