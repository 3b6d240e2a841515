"""Result types, output allocation and reference that ``layer_norm`` and ``rms_norm`` share."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..runtime import scratch_sizes
from .fp8_output import FP8Output, allocate


class NormOutput(NamedTuple):
    """Results of a norm's forward over the rows of x [rows, cols].

    Attributes:
        y: [rows, cols] in x's dtype, the normalised rows.
        mean: [rows] float32; None for ``rms_norm``.
        rstd: [rows] float32, 1 / sqrt(variance + eps), for ``rms_norm`` of the mean of squares.
        residual_sum: [rows, cols], x + residual; None without a residual.
    """

    y: torch.Tensor
    mean: torch.Tensor | None
    rstd: torch.Tensor
    residual_sum: torch.Tensor | None


class NormFP8Output(NamedTuple):
    """Results as in ``NormOutput``, with FP8 copies of the normalised rows as ``y``."""

    y: FP8Output
    mean: torch.Tensor | None
    rstd: torch.Tensor
    residual_sum: torch.Tensor | None


class NormGradients(NamedTuple):
    """Results of a norm's backward.

    Attributes:
        dx: [rows, cols] in x's dtype, the gradient of both x and the residual.
        dweight: [cols] in the weight's dtype, without a weight in x's; None if not requested.
        dbias: [cols] in the dtype of ``dweight``; None if not requested, and for ``rms_norm``.
    """

    dx: torch.Tensor
    dweight: torch.Tensor | None
    dbias: torch.Tensor | None


def as_rows(op: str, name: str, t: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Returns ``t`` as a contiguous matrix [rows, cols]; cols is the size of its last dimension.

    Raises ValueError if it has no dimension or not the shape of ``like``.
    """
    if t.dim() == 0:
        raise ValueError(f"{op}: {name} must have at least 1 dimension, got shape []")
    if like is not None and t.shape != like.shape:
        raise ValueError(f"{op}: {name} must have shape {list(like.shape)}, got {list(t.shape)}")
    if t.dim() != 2:
        t = t.reshape(math.prod(t.shape[:-1]), t.shape[-1])
    return t.contiguous()


def contiguous(t: torch.Tensor | None) -> torch.Tensor | None:
    """Returns a tensor made contiguous; returns None, or what the op will refuse, as it is."""
    return t.contiguous() if isinstance(t, torch.Tensor) else t


def statistic(x: torch.Tensor) -> torch.Tensor:
    """Returns an uninitialised float32 tensor [rows] for x [rows, cols], on x's device."""
    return x.new_empty(x.shape[0], dtype=torch.float32)


def allocate_fp8(
    op: str,
    x: torch.Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    scale_inv: torch.Tensor | None,
    pad_columnwise: bool,
) -> FP8Output:
    """Returns uninitialised FP8 outputs for x [rows, cols]; a ``scale_inv`` of None makes one."""
    rows, cols = x.shape
    out = allocate(op, x, rows, cols, fp8_dtype, rowwise, columnwise, pad_columnwise)
    return out if scale_inv is None else out._replace(scale_inv=scale_inv)


def bwd_workspace(x: torch.Tensor, gradients: int) -> torch.Tensor:
    """Returns scratch for sums of ``gradients`` parameters, float32 [lines, gradients * cols].

    csrc/common/norm/arguments.h defines the number of lines.
    """
    rows, cols = x.shape
    lines = scratch_sizes.norm_lines(rows, cols)
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
    """Computes layer norm (``centre``) or RMS norm over x's last dimension in plain PyTorch.

    x and ``residual`` are [..., cols] in one floating-point dtype, ``weight`` and ``bias`` [cols]
    or None. Arithmetic is float32, or float64 for float64; y and the residual sum are rounded to
    x's dtype.
    """
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
