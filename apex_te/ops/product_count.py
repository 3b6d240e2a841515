"""Count of the GEMMs of quantized operands that this process has issued."""

from __future__ import annotations

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
