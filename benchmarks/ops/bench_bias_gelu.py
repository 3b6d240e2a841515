"""bias_gelu: bias and gelu in bf16 and straight to FP8, with dbias (bytes: activation_rows)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import activation_rows
from activation_rows import E4M3, Case, Row, to_fp8

from apex_te.ops import bias_gelu as op


def fwd(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(x + bias, approximate="tanh")


def bwd(dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.gelu_backward(dy, x + bias, approximate="tanh")


def bwd_with_dbias(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    dx = bwd(dy, x, bias)
    return dx, dx.sum(0)


def fwd_fp8(x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return to_fp8(fwd(x.float(), bias.float()))


def bwd_fp8(dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
    dx = bwd(dy.float(), x.float(), bias.float())
    return *to_fp8(dx), dx.sum(0)


def functions(case: Case) -> list[Row]:
    x, dy, bias, peers = case.x, case.dy, case.bias, case.peers
    fp8: dict[str, Any] = {"scale": case.scale, "fp8_dtype": E4M3, "amax": case.amax}
    rows: list[Row] = [
        ("bias_gelu_fwd", 4, lambda: op.bias_gelu_fwd(x, bias), peers(fwd, x, bias)),
        ("bias_gelu_bwd", 6, lambda: op.bias_gelu_bwd(dy, x, bias), peers(bwd, dy, x, bias)),
        (
            "bias_gelu_bwd + dbias", 6, lambda: op.bias_gelu_bwd(dy, x, bias, with_dbias=True),
            peers(bwd_with_dbias, dy, x, bias),
        ),
        (
            "bias_gelu_fwd_fp8, both", 4, lambda: op.bias_gelu_fwd_fp8(x, bias, **fp8),
            peers(fwd_fp8, x, bias, eager=False),
        ),
        (
            "bias_gelu_bwd_fp8, both", 6, lambda: op.bias_gelu_bwd_fp8(dy, x, bias, **fp8), {},
        ),
        (
            "bias_gelu_bwd_fp8, both + dbias", 6,
            lambda: op.bias_gelu_bwd_fp8(dy, x, bias, with_dbias=True, **fp8),
            peers(bwd_fp8, dy, x, bias, eager=False),
        ),
    ]  # fmt: skip
    if case.is_first:
        rows += [
            ("bias_gelu_fwd, erf", 4, lambda: op.bias_gelu_fwd(x, bias, form="erf"), {}),
            (
                "bias_gelu_bwd + dbias, erf", 6,
                lambda: op.bias_gelu_bwd(dy, x, bias, form="erf", with_dbias=True), {},
            ),
            (
                "bias_gelu_bwd_fp8, both + dbias, erf", 6,
                lambda: op.bias_gelu_bwd_fp8(dy, x, bias, form="erf", with_dbias=True, **fp8), {},
            ),
        ]  # fmt: skip
    return rows


if __name__ == "__main__":
    activation_rows.run("bias_gelu", functions)
