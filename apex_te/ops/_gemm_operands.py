"""Operands of FP8 GEMMs: which ones cuBLASLt takes, and their values on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from .. import runtime

_lib = runtime.ops("fp8_gemm")

# cuBLASLt reads FP8 operands in 16-byte units along K and writes N in units of 16.
MULTIPLE = 16


def is_taken(a, b, c, out) -> bool:
    """Returns True if cuBLASLt takes the operands as they are, without padding or copies."""
    if c is not None and c.data_ptr() % MULTIPLE:
        return False
    return right_is_taken(b) and left_is_taken(a, out)


def right_is_taken(b) -> bool:
    """Returns True if cuBLASLt takes ``b``: address, N and K divisible by 16, and K above 0."""
    cols, depth = b.shape
    return depth > 0 and not (cols | depth | b.data_ptr()) % MULTIPLE


def left_is_taken(a, out) -> bool:
    """Returns True if cuBLASLt takes left operand and output: aligned, and not without elements."""
    return not (a.data_ptr() | out.data_ptr()) % MULTIPLE and out.numel() > 0


def decoded(op: str, a: torch.Tensor, b: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the float32 values, without scale_inv, of both operands of a GEMM on the CPU."""
    for name, operand in (("a", a), ("b", b)):
        if not operand.is_contiguous():
            raise ValueError(
                f"{op}: {name} must be contiguous, got strides {list(operand.stride())}"
            )
        values = torch.empty(operand.shape, dtype=torch.float32)
        _lib.fp8_decode(operand, values)
        yield values


def run_empty(out, bias, c, aux, accumulate):
    """Writes the result of a GEMM with K = 0 or without elements: bias + c, or zeros."""
    if accumulate or out.numel() == 0:
        return
    value = torch.zeros_like(out) if bias is None else bias.to(out.dtype).expand_as(out)
    if aux is not None:
        aux.copy_(value)
        value = F.gelu(value, approximate="tanh")
    out.copy_(value if c is None else value.float() + c.float())
