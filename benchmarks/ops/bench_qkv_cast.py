"""qkv_cast: bandwidth against a copy of the same bytes, and against torch's copies and a cast.

Shapes are Llama-3-8B's (8 groups of 4 queries, heads of 128) and GPT's (32 heads). Bytes counted: 4
an element for bf16 to both copies (read 2, write 1 + 1), 3 for the rowwise one alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import harness
import torch

from apex_te.module._core.heads import HeadLayout
from apex_te.ops.cast_transpose import cast_transpose
from apex_te.ops.qkv_cast import qkv_cast_grad, qkv_cast_weight

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SIZE, HIDDEN = 128, 4096


def gradient_calls(
    tokens: int, groups: int, repeats: int, with_dbias: bool
) -> tuple[int, Callable[[], Any], Callable[[], Any]]:
    """Bytes that a cast of gradients moves, the cast, and torch's way to the same copies."""
    layout = HeadLayout("thd", repeats, groups, SIZE, True)
    heads = [harness.normal(tokens, n, SIZE) for n in (groups * repeats, groups, groups)]
    features = groups * (repeats + 2) * SIZE
    one, amax = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")

    def ours() -> None:
        qkv_cast_grad(
            *heads, one, E5M2, interleaved=True, amax=amax, with_dbias=with_dbias,
            pad_columnwise=True,
        )  # fmt: skip

    def torchs() -> None:
        x = layout.joined(heads, (tokens, features))
        cast_transpose(x, one, E5M2, amax=amax, with_dbias=with_dbias)

    return 4 * tokens * features, ours, torchs


def weight_calls(
    groups: int, repeats: int, columnwise: bool
) -> tuple[int, Callable[[], Any], Callable[[], Any]]:
    """Bytes that a cast of the weight moves, the cast, and the cast without another order."""
    weight = harness.normal(groups * (repeats + 2) * SIZE, HIDDEN)
    one, amax = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")

    def ours() -> None:
        qkv_cast_weight(
            weight, one, E4M3, repeats=repeats, groups=groups, columnwise=columnwise, amax=amax
        )

    def plain() -> None:
        cast_transpose(weight, one, E4M3, columnwise=columnwise, amax=amax)

    return (3 + columnwise) * weight.numel(), ours, plain


@harness.case("qkv_cast")
def rows() -> Iterator[harness.Row]:
    calls = {}
    for tokens in (8192, 8190):
        for groups, repeats in ((8, 4), (32, 1)):
            for dbias in (False, True):
                name = f"gradient {tokens} x {groups} x {repeats + 2}{' + dbias' * dbias}"
                calls[name] = gradient_calls(tokens, groups, repeats, dbias)
    calls["weight 8 x 6, rowwise"] = weight_calls(8, 4, False)
    calls["weight 8 x 6, both"] = weight_calls(8, 4, True)
    for name, (num_bytes, call, other) in calls.items():
        ours, copy = harness.kernel_us(call), harness.copy_us(num_bytes)
        yield {
            "case": name,
            **ours,
            "TB/s": harness.terabytes_per_second(num_bytes, ours["us"]),
            "of copy": copy["us"] / ours["us"],
            "other way us": harness.kernel_us(other)["us"],
        }
