"""activation: gelu and the other functions in bf16 and straight to FP8 (bytes: activation_rows)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import activation_rows
from activation_rows import E4M3, Case, Row, to_fp8

from apex_te.ops import activation as op


def gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def gelu_bwd(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.gelu_backward(dy, x, approximate="tanh")


def gelu_fp8(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return to_fp8(gelu(x.float()))


def gelu_bwd_fp8(dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return to_fp8(gelu_bwd(dy.float(), x.float()))


def eager_bwd(x: torch.Tensor, kind: str, dy: torch.Tensor) -> Callable[[], Any]:
    leaf = x.detach().requires_grad_()
    y = op.reference(leaf, kind)
    return lambda: torch.autograd.grad(y, leaf, dy, retain_graph=True)


def functions(case: Case) -> list[Row]:
    x, dy, peers = case.x, case.dy, case.peers
    fp8: dict[str, Any] = {"scale": case.scale, "fp8_dtype": E4M3, "amax": case.amax}
    rows: list[Row] = [
        ("gelu_fwd", 4, lambda: op.activation_fwd(x, "gelu"), peers(gelu, x)),
        ("gelu_bwd", 6, lambda: op.activation_bwd(dy, x, "gelu"), peers(gelu_bwd, dy, x)),
        (
            "gelu_fwd_fp8, rowwise", 3,
            lambda: op.activation_fwd_fp8(x, "gelu", columnwise=False, **fp8), {},
        ),
        (
            "gelu_fwd_fp8, both", 4,
            lambda: op.activation_fwd_fp8(x, "gelu", **fp8), peers(gelu_fp8, x, eager=False),
        ),
        (
            "gelu_bwd_fp8, both", 6,
            lambda: op.activation_bwd_fp8(dy, x, "gelu", **fp8),
            peers(gelu_bwd_fp8, dy, x, eager=False),
        ),
    ]  # fmt: skip
    if not case.is_first:
        return rows
    for kind in op.KINDS[1:]:
        rows += [
            (
                f"{kind}_fwd", 4, lambda kind=kind: op.activation_fwd(x, kind),
                {"torch": lambda kind=kind: op.reference(x, kind)},
            ),
            (
                f"{kind}_bwd", 6, lambda kind=kind: op.activation_bwd(dy, x, kind),
                {"torch": eager_bwd(x, kind, dy)},
            ),
            (
                f"{kind}_fwd_fp8, both", 4,
                lambda kind=kind: op.activation_fwd_fp8(x, kind, **fp8), {},
            ),
            (
                f"{kind}_bwd_fp8, both", 6,
                lambda kind=kind: op.activation_bwd_fp8(dy, x, kind, **fp8), {},
            ),
        ]  # fmt: skip
    return rows


if __name__ == "__main__":
    activation_rows.run("activation", functions)
