"""Count of the matrix products of quantized operands that this process has issued."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

_count = 0


def add(products: int = 1) -> None:
    """Counts products; one that torch.compile traces into a graph is not seen."""
    global _count
    if not (is_dynamo_compiling() or torch.compiler._is_compiling_flag):
        _count += products


def fp8_gemm_count() -> int:
    """Returns the number of products of quantized operands that this process has issued."""
    return _count
