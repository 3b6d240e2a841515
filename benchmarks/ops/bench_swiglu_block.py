"""swiglu_block: a gated activation and its cast in 1x128 blocks in one kernel, against the two ops.

Bytes counted for each element of the [M, F] output: forward 6 (read gate and up, write two FP8
copies), backward 10 (read both inputs and the gradient, write two copies of two gradients); with
each copy 4 more for 128 elements. The two ops write and read a bf16 result between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import harness
import torch

from apex_te.ops.block_quantize import block_quantize
from apex_te.ops.swiglu import swiglu_bwd, swiglu_fwd
from apex_te.ops.swiglu_block import swiglu_bwd_block, swiglu_fwd_block

SHAPES = [(8192, 14336), (16384, 14336), (16384, 3584), (8190, 3584), (16384, 4095)]
E4M3 = torch.float8_e4m3fn


@harness.case("swiglu_block")
def rows() -> Iterator[harness.Row]:
    """The forward and the backward at each shape [M, F], both layouts, padded columns."""
    pad, scales = {"pad_columnwise": True}, 2 * 4 / 128
    for shape in SHAPES:
        tokens, features = shape
        x, grad = harness.normal(tokens, 2 * features), harness.normal(tokens, features)
        calls: dict[str, tuple[float, Callable[[], Any], Callable[[], Any]]] = {
            "swiglu_fwd_block, both": (
                6 + scales,
                lambda x=x: swiglu_fwd_block(x, None, E4M3, **pad),
                lambda x=x: block_quantize(swiglu_fwd(x), E4M3, **pad),
            ),
            "swiglu_bwd_block, both": (
                10 + 2 * scales,
                lambda x=x, grad=grad: swiglu_bwd_block(grad, x, None, E4M3, **pad),
                lambda x=x, grad=grad: block_quantize(swiglu_bwd(grad, x).input, E4M3, **pad),
            ),
        }
        for function, (each, fused, apart) in calls.items():
            num_bytes, peers = int(each * tokens * features), {"two ops": apart}
            yield harness.measure(function, shape, num_bytes, fused, peers, repeats=20)
