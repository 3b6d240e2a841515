"""Formula of a norm, found by what a copy of it computes for a few rows."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import nn

from . import _matching as matching
from ._probe import agree, numbers, probed, random, stand_in

_FP32_EPS = torch.finfo(torch.float32).eps


class NormFormula(NamedTuple):
    """Norm over the last dimension: RMS or LayerNorm, times the weight or ``1 + weight``."""

    is_rms: bool
    zero_centered: bool
    eps: float


def known_norm(module: Any) -> NormFormula | None:
    """Returns the formula of torch's ``LayerNorm`` and ``RMSNorm`` and of norms that compute alike.

    It is None for any other module, such as an instance of a subclass of these two.
    """
    if not isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return _formula(module)
    if not matching.is_plain(module, nn.LayerNorm, nn.RMSNorm):
        return None
    # apex_te computes all norms in fp32, so that None is the eps of fp32.
    return NormFormula(
        type(module) is nn.RMSNorm, False, _FP32_EPS if module.eps is None else module.eps
    )


def _formula(module: nn.Module) -> NormFormula | None:
    """Returns the formula of a module with a weight ``[cols]``, and perhaps a bias; None if other.

    A copy with random fp32 parameters on the CPU is compared with formulas in float64, once for
    each class, size and values of scalar attributes. So the module's own parameters may be on any
    device or sharded.
    """
    own = module._parameters
    weight = own.get("weight")
    if (
        weight is None
        or not own.keys() <= {"weight", "bias"}
        or any(p is not None and p.shape != weight.shape for p in own.values())
        or weight.dim() != 1
        or any(True for _ in module.buffers())
        or any(True for _ in module.children())
        or "forward" in vars(module)
        or len(inspect.signature(type(module).forward).parameters) != 2
    ):
        return None
    found: NormFormula | None = probed(module, _find)
    return found


def _find(module: Any) -> NormFormula | None:
    """Returns the first formula with which the module agrees."""
    cols = len(module.weight)
    if cols < 4:  # too few to tell formulas apart
        return None
    own = module._parameters
    copies = [
        stand_in(module, {k: p if p is None else nn.Parameter(random(cols) * scale)
                          for k, p in own.items()})
        for scale in (1.0, 1e4)  # the second, so that a clamp shows
    ]  # fmt: skip
    rows = random(4, cols)
    rows = torch.stack([rows[0] * 1e-4, rows[1], rows[2] + 3, rows[3] * 1e3])
    given = [value for value in numbers(module) if 0 <= value < 0.1]
    for eps in dict.fromkeys([*given, 1e-5, 1e-6, 1e-8, 1e-12, _FP32_EPS]):
        for is_rms in (False, True) if own.get("bias") is None else (False,):
            for zero_centered in (False, True):
                formula = NormFormula(is_rms, zero_centered, eps)
                if all(_holds(copied, formula, rows) for copied in copies):
                    return formula
    return None


def _holds(copied: Any, formula: NormFormula, rows: torch.Tensor) -> bool:
    """Returns True if a stand-in has the formula: rows apart or together, in training or not."""
    expected = _computed(formula, rows, copied._parameters)
    for training in (False, True):
        vars(copied)["training"] = training
        for shape in ((4, -1), (2, 2, -1), (1, 2, 2, -1)):
            if not agree(copied(rows.view(shape).clone()), expected.view(rows.view(shape).shape)):
                return False
    return _keeps_dtype(copied, rows, expected)


def _keeps_dtype(copied: Any, rows: torch.Tensor, expected: torch.Tensor) -> bool:
    """Returns True if a stand-in in bf16 returns bf16, close to ``expected``."""
    own = copied._parameters.items()
    low = stand_in(copied, {k: p if p is None else nn.Parameter(p.bfloat16()) for k, p in own})
    out = low(rows.bfloat16())
    return out.dtype is torch.bfloat16 and agree(out, expected, 0.05)


def _computed(formula: NormFormula, rows: torch.Tensor, parameters: dict[str, Any]) -> torch.Tensor:
    """Returns the norm of ``rows`` in float64."""
    x = rows.double()
    if not formula.is_rms:
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + formula.eps).sqrt()
    x = x * (parameters["weight"].double() + formula.zero_centered)
    bias = parameters.get("bias")
    return x if bias is None else x + bias.double()
