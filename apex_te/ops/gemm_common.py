"""Count, argument checks and PyTorch products that the ops of GEMMs share."""

from __future__ import annotations

import torch

from ..runtime.tracing import is_compiling
from .fp8_output import FP8_DTYPES

_E5M2 = (torch.float8_e5m2, torch.float8_e5m2fnuz)
_count = 0


def count_gemms(number: int = 1) -> None:
    """Adds ``number`` to ``fp8_gemm_count``; does nothing while torch.compile is tracing."""
    global _count
    if not is_compiling():
        _count += number


def fp8_gemm_count() -> int:
    """Returns the number of GEMMs of quantized operands that this process has issued.

    Grouped GEMMs in graphs of torch.compile are not counted.
    """
    return _count


def bias_dtype(out_dtype: torch.dtype) -> torch.dtype:
    """Returns a GEMM's bias dtype: bfloat16 for a float32 output, else that of the output.

    cuBLASLt's FP8 GEMMs support no other dtype; the GEMMs of all formats follow this rule.
    """
    return torch.bfloat16 if out_dtype is torch.float32 else out_dtype


def prepare(name, a, b, out, out_dtype, bias, accumulate, spare=0):
    """Checks the arguments of the GEMM ``name`` of [M, K] and [N, K], and allocates its output.

    With ``accumulate`` ``out`` must be given; a new output has ``spare`` rows in addition to M.
    Returns ``(out, bias)``, the bias [N] in ``bias_dtype`` or None.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(
            f"{name}: a and b must be [M, K] and [N, K], got {list(a.shape)} and {list(b.shape)}"
        )
    if a.dtype in _E5M2 and b.dtype in _E5M2:
        raise NotImplementedError(
            f"{name}: one of a and b must have dtype float8_e4m3fn, got float8_e5m2 twice"
        )
    rows, cols = a.shape[0], b.shape[0]
    if out is None:
        if accumulate:
            raise ValueError(f"{name}: out must be given with accumulate, got None")
        out = a.new_empty((rows + spare, cols), dtype=out_dtype)
    elif out.shape != (rows, cols):
        raise ValueError(f"{name}: out must have shape {[rows, cols]}, got {list(out.shape)}")
    if bias is not None:
        if bias.is_complex():
            raise TypeError(f"{name}: bias must have a real dtype, got {bias.dtype}")
        bias = bias.to(bias_dtype(out.dtype))
    return out, bias


def check_addend(name, c, out, accumulate, gelu):
    """Checks ``c``, which a GEMM adds to its result, against ``out``, whose values are not read.

    ``accumulate`` and ``gelu`` must be False with ``c``.
    """
    for option, given in (("accumulate", accumulate), ("gelu", gelu)):
        if given:
            raise ValueError(f"{name}: c must be None with {option}=True, got a tensor")
    if c.dtype is not out.dtype:
        raise TypeError(f"{name}: c must have the dtype of the output, {out.dtype}, got {c.dtype}")
    if c.shape != out.shape:
        raise ValueError(f"{name}: c must have shape {list(out.shape)}, got {list(c.shape)}")


def check_operands(op: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """Raises TypeError unless both operands are float8_e4m3fn or float8_e5m2.

    ``op`` is the op's name, for the error.
    """
    for name, operand in (("a", a), ("b", b)):
        if operand.dtype not in FP8_DTYPES:
            raise TypeError(
                f"{op}: {name} must have dtype float8_e4m3fn or float8_e5m2, got {operand.dtype}"
            )


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
