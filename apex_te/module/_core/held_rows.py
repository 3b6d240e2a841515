"""Rows that backward reads, held in FP8 until then with ``fp8_autocast(save="small")``."""

from __future__ import annotations

import torch

from ...ops.block_quantize import block_dequantize, block_quantize


def hold(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``x`` [rows, cols] in E4M3, and the scales of its blocks of 1x128, powers of two."""
    held = block_quantize(x, torch.float8_e4m3fn, columnwise=False, scales="pow2")
    assert held.rowwise is not None
    assert held.rowwise_scale_inv is not None
    return held.rowwise, held.rowwise_scale_inv


def values_of(
    held: torch.Tensor, scale_inv: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Returns the values in ``dtype`` of what ``hold`` returned; without scales ``held`` itself."""
    return held if scale_inv is None else block_dequantize(held, scale_inv, dtype=dtype)
