"""Rows that backward reads, held in FP8 until then with ``fp8_autocast(save="small")``."""

from __future__ import annotations

from typing import Any

import torch

from ...ops.block_quantize import block_dequantize, block_quantize
from .fused_casts import is_gated


def hold(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``x`` [rows, cols] in E4M3, and the scales of its blocks of 1x128, powers of two."""
    held = block_quantize(x, torch.float8_e4m3fn, columnwise=False, scales="pow2")
    assert held.rowwise is not None
    assert held.rowwise_scale_inv is not None
    return held.rowwise, held.rowwise_scale_inv


def input_of(
    activation: Any, held: torch.Tensor, scale_inv: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns what ``hold`` returned if ops of ``activation`` read it; else values and None.

    ``dtype`` is that of the values. Without scales ``held`` are the values.
    """
    if scale_inv is None or (is_gated(activation) and dtype is torch.bfloat16):
        return held, scale_inv
    return block_dequantize(held, scale_inv, dtype=dtype), None
