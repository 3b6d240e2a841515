"""Count of the GEMMs of quantized operands that this process has issued."""

from __future__ import annotations

from ..runtime.tracing import is_compiling

_count = 0


def add(products: int = 1) -> None:
    """Adds to the count of GEMMs; GEMMs that torch.compile traces into a graph are not counted."""
    global _count
    if not is_compiling():
        _count += products


def fp8_gemm_count() -> int:
    """Returns the number of GEMMs of quantized operands that this process has issued."""
    return _count
