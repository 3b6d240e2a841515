"""GEMMs of PyTorch that ops make, and the count of GEMMs of quantized operands."""

from __future__ import annotations

import torch

from ..runtime.tracing import is_compiling

_count = 0


def add(products: int = 1) -> None:
    """Adds ``products`` to ``fp8_gemm_count``; does nothing while torch.compile is tracing."""
    global _count
    if not is_compiling():
        _count += products


def fp8_gemm_count() -> int:
    """Returns the number of GEMMs of quantized operands that this process has issued.

    Grouped GEMMs in graphs of torch.compile are not counted.
    """
    return _count


def product_into(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes ``a [M, K] @ b [K, N] + bias [N]`` in ``out`` [M, N], or returns a new tensor.

    Under a dispatch mode the GEMM writes a new tensor, which is then copied to ``out``. Selective
    activation checkpointing is such a mode: its recompute returns the saved result instead of
    running the op, so an ``out`` argument would not be written.
    """
    modes = not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack()
    into = None if modes else out
    args = (a, b) if bias is None else (bias, a, b)
    product = (torch.mm if bias is None else torch.addmm)(*args, out=into)
    return product if out is None or into is out else out.copy_(product)


def float32_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns ``a @ b`` of float32 matrices in float32, even under ``torch.autocast``."""
    device = a.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return torch.mm(a, b)
    with torch.autocast(device, enabled=False):
        return torch.mm(a, b)
