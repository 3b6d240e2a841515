"""Shapes, scratch, outputs and the reference that ``layer_norm`` and ``rms_norm`` share."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from .fp8_output import FP8Output, allocate


class NormOutput(NamedTuple):
    """Results of a forward over the rows of x."""

    y: torch.Tensor  # [rows, cols] in x's dtype
    mean: torch.Tensor | None  # [rows] float32; None for rms_norm
    rstd: torch.Tensor  # [rows] float32
    residual_sum: torch.Tensor | None  # [rows, cols]: x + residual, which was normalised


class NormFP8Output(NamedTuple):
    """Results of a forward that writes FP8; the fields are those of ``NormOutput``."""

    y: FP8Output
    mean: torch.Tensor | None
    rstd: torch.Tensor
    residual_sum: torch.Tensor | None


class NormGradients(NamedTuple):
    """Results of a backward, with None for a gradient that was not asked for."""

    dx: torch.Tensor  # [rows, cols], also the residual's gradient
    dweight: torch.Tensor | None  # [cols] in the weight's dtype
    dbias: torch.Tensor | None


def as_rows(op: str, name: str, t: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Returns ``t`` as contiguous [rows, cols] over its last dimension.

    Raises:
        ValueError: it has no dimension, or not the shape of ``like``.
    """
    if t.dim() == 0:
        raise ValueError(f"{op}: {name} must have at least 1 dimension, got shape []")
    if like is not None and t.shape != like.shape:
        raise ValueError(f"{op}: {name} must have shape {list(like.shape)}, got {list(t.shape)}")
    return t.reshape(math.prod(t.shape[:-1]), t.shape[-1]).contiguous()


def contiguous(t: torch.Tensor | None) -> torch.Tensor | None:
    """Returns ``t`` contiguous; an object that is no tensor stays, for the op to refuse by name."""
    return t.contiguous() if isinstance(t, torch.Tensor) else t


def statistic(x: torch.Tensor) -> torch.Tensor:
    """Returns an uninitialised float32 element for each row of x."""
    return x.new_empty(x.shape[0], dtype=torch.float32)


def allocate_fp8(
    op: str,
    x: torch.Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    scale_inv: torch.Tensor | None,
) -> FP8Output:
    """Returns the FP8 outputs for x's rows, with ``scale_inv`` if it is given."""
    rows, cols = x.shape
    out = allocate(op, x, rows, cols, fp8_dtype, rowwise, columnwise)
    return out if scale_inv is None else out._replace(scale_inv=scale_inv)


def bwd_workspace(x: torch.Tensor, gradients: int) -> torch.Tensor:
    """Returns scratch for partial sums of weight gradients (csrc/common/norm/arguments.h)."""
    rows, cols = x.shape
    lines = min(rows, max(min(264, (1 << 21) // max(cols, 1)), 16))
    return x.new_empty((lines, gradients * cols), dtype=torch.float32)


def reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *,
    centre: bool,
    zero_centered_gamma: bool = False,
    residual: torch.Tensor | None = None,
) -> NormOutput:
    """Computes the formula in float32 or float64; y and the sum are rounded to x's dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    total = None if residual is None else (x.to(wide) + residual.to(wide)).to(x.dtype)
    values = (x if total is None else total).to(wide)
    mean = values.mean(-1, keepdim=True) if centre else None
    if mean is not None:
        values = values - mean
    rstd = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    y = values * rstd
    if weight is not None:
        y = y * (weight.to(wide) + (1.0 if zero_centered_gamma else 0.0))
    if bias is not None:
        y = y + bias.to(wide)
    return NormOutput(
        y.to(x.dtype), None if mean is None else mean.squeeze(-1), rstd.squeeze(-1), total
    )
