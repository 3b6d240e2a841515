"""The casts, quantizers and decoders that cpu.py measures, and what its rows are made of."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent / "ops"))
import bench_hif8

from apex_te.ops import hif8
from apex_te.ops.block_quantize import block_dequantize, block_quantize
from apex_te.ops.cast_transpose import cast_transpose
from apex_te.ops.current_scale import current_scale, tensor_amax
from apex_te.ops.mx_quantize import mx_dequantize, mx_quantize

CAST_SHAPE = (8192, 8192)  # beyond the caches
SLOW_SHAPE = (512, 4096)  # of a slow formula
E4M3 = torch.float8_e4m3fn
ONE = torch.ones(1)


class Row(NamedTuple):
    """One function: what runs, the formula it is compared with, the bytes a cast must move."""

    function: str
    call: Callable[[], Any]
    formula: Callable[[], Any] | None
    num_bytes: int = 0


Rows = Iterator[Row]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def backward_of(formula: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Callable[[], Any]:
    """Autograd's backward pass through a formula, alone."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    out = formula(*leaves)
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def to_fp8(values: torch.Tensor, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
    return (values.float() * scale).clamp(-448.0, 448.0).to(E4M3)


def both(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return codes, codes.t().contiguous()


def casts(dtype: torch.dtype) -> Rows:
    """With one scale for the tensor: given, current, and HiF8."""
    x = randn(*CAST_SHAPE, dtype=dtype)
    n, size = x.numel(), x.element_size()
    row, col = torch.empty_like(x, dtype=E4M3), torch.empty_like(x, dtype=E4M3)
    amax, scale_inv = torch.zeros(1), torch.empty(1)
    layouts = {
        "both": {"out_rowwise": row, "out_columnwise": col},
        "rowwise": {"out_rowwise": row, "columnwise": False},
        "columnwise": {"out_columnwise": col, "rowwise": False},
    }
    given = {"amax": amax, "scale_inv": scale_inv}
    for layout, options in layouts.items():
        written = 2 if layout == "both" else 1
        codes = {
            key: out.view(torch.uint8) if isinstance(out, torch.Tensor) else out
            for key, out in options.items()
        }
        yield Row(
            f"cast_transpose {layout}",
            lambda o=options: cast_transpose(x, ONE, E4M3, **given, **o),
            (lambda: both(to_fp8(x))) if layout == "both" else None,
            n * (size + written),
        )
        yield Row(
            f"current_scale {layout}",
            lambda o=options: current_scale(x, E4M3, **o),
            (lambda: both(to_fp8(x, 448.0 / x.abs().max()))) if layout == "both" else None,
            n * (2 * size + written),
        )
        yield Row(
            f"hif8 {layout}",
            lambda o=codes: hif8.quantize(x, ONE, amax=amax, **o),
            None,
            n * (size + written),
        )
    yield Row("tensor_amax", lambda: tensor_amax(x), lambda: x.abs().max(), n * size)


def decodes(dtype: torch.dtype) -> Rows:
    """HiF8 both ways against its formula."""
    small = randn(*SLOW_SHAPE, dtype=dtype)
    x = randn(*CAST_SHAPE, dtype=dtype)
    codes = hif8.encode(x)
    out = torch.empty_like(x)
    yield Row(
        "hif8 quantize, 512x4096",
        lambda: hif8.quantize(small, ONE),
        lambda: bench_hif8.plain(small, ONE),
    )
    yield Row(
        "hif8 decode",
        lambda: hif8.decode(codes, out=out),
        lambda: hif8.reference_decode(codes).to(dtype),
        x.numel() * (1 + x.element_size()),
    )


def plain_blocks(x: torch.Tensor, block_rows: int, block_cols: int, mx: bool) -> torch.Tensor:
    """Codes of x in blocks, each with its own scale: a power of two for MX."""
    rows, cols = x.shape
    blocks = x.float().view(rows // block_rows, block_rows, cols // block_cols, block_cols)
    scale = 448.0 / blocks.abs().amax((1, 3), keepdim=True)
    if mx:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return to_fp8(blocks, scale).view(rows, cols)


def plain_lines(x: torch.Tensor, block: int, mx: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks along rows, and along columns from the transposed input."""
    return plain_blocks(x, 1, block, mx), plain_blocks(x.t().contiguous(), 1, block, mx)


def block_casts(dtype: torch.dtype) -> Rows:
    """Scales of 1 x 128, 128 x 128 and, MX, of 32 elements; both layouts from one read."""
    x = randn(*CAST_SHAPE, dtype=dtype)
    n, size = x.numel(), x.element_size()
    back = torch.empty_like(x)
    lines, tiles = (block_quantize(x, E4M3, block_rows=b) for b in (1, 128))
    mx = mx_quantize(x, E4M3)

    def plain_back(codes: torch.Tensor, block: int) -> torch.Tensor:
        scales = torch.ones(codes.numel() // block, 1)
        return (codes.float().view(-1, block) * scales).to(dtype)

    yield Row(
        "block_quantize 1x128 both",
        lambda: block_quantize(x, E4M3, out=lines),
        lambda: plain_lines(x, 128, False),
        n * (size + 2),
    )
    yield Row(
        "block_quantize 128x128 both",
        lambda: block_quantize(x, E4M3, block_rows=128, out=tiles),
        lambda: both(plain_blocks(x, 128, 128, False)),
        n * (size + 2),
    )
    yield Row(
        "mx_quantize both",
        lambda: mx_quantize(x, E4M3, out=mx),
        lambda: plain_lines(x, 32, True),
        n * (size + 2),
    )
    yield Row(
        "block_dequantize 1x128",
        lambda: block_dequantize(lines.rowwise, lines.rowwise_scale_inv, dtype=dtype, out=back),
        lambda: plain_back(lines.rowwise, 128),
        n * (size + 1),
    )
    yield Row(
        "block_dequantize 128x128",
        lambda: block_dequantize(
            tiles.rowwise, tiles.rowwise_scale_inv, block_rows=128, dtype=dtype, out=back
        ),
        lambda: plain_back(tiles.rowwise, 128),
        n * (size + 1),
    )
    yield Row(
        "mx_dequantize",
        lambda: mx_dequantize(mx.rowwise, mx.rowwise_scale, dtype=dtype, out=back),
        lambda: plain_back(mx.rowwise, 32),
        n * (size + 1),
    )


CASTS = (casts, decodes, block_casts)
