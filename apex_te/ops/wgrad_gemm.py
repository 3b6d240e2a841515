"""Computes wgrad in bf16 or fp32 into a given tensor, optionally added to it, rounded once."""

from __future__ import annotations

import torch

from .. import runtime
from .binding import bind, check_dense, checked, note_written
from .fp8_gemm import WORKSPACE_BYTES

__all__ = ["wgrad_gemm"]

_lib = runtime.ops("fp8_gemm")
_SHORT = (torch.float16, torch.bfloat16)


@checked
def wgrad_gemm(
    dy: torch.Tensor, x: torch.Tensor, out: torch.Tensor, *, accumulate: bool = False
) -> torch.Tensor:
    """Writes the product ``dy[rows, M].T @ x[rows, N]`` to ``out[M, N]``, or adds it to ``out``.

    For float16 and bfloat16 operands everything, including ``out``, is summed in float32 and
    rounded once to out's dtype: a float32 ``out`` gets sums that were never rounded to 16 bits.
    Wider operands are multiplied as torch multiplies their dtype.

    Args:
        dy: [rows, M] in a floating-point dtype, contiguous.
        x: [rows, N] in dy's dtype, contiguous.
        out: [M, N] in any floating-point dtype, contiguous; written.
        accumulate: add to ``out`` instead of overwriting it.

    Returns:
        ``out``.

    Raises:
        TypeError: ``dy`` and ``x`` differ in dtype.
        ValueError: the shapes do not match.
    """
    check_dense("wgrad_gemm", dy=dy, x=x, out=out)
    if dy.dtype is not x.dtype:
        raise TypeError(f"wgrad_gemm: x must have dtype {dy.dtype} like dy, got {x.dtype}")
    if dy.dim() != 2 or x.dim() != 2 or dy.shape[0] != x.shape[0]:
        raise ValueError(
            "wgrad_gemm: dy and x must be [rows, M] and [rows, N], "
            f"got {list(dy.shape)} and {list(x.shape)}"
        )
    shape = (dy.shape[1], x.shape[1])
    if out.shape != shape:
        raise ValueError(f"wgrad_gemm: out must have shape {list(shape)}, got {list(out.shape)}")
    _multiply(dy, x, out, accumulate)
    note_written(out)
    return out


def _run(dy: torch.Tensor, x: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
    if dy.shape[0] == 0 or out.numel() == 0:
        if not accumulate:
            out.zero_()
        return
    # cuBLASLt rounds a GEMM to a 16-bit output before it adds it to the output.
    once = out.dtype is torch.float32 or (out.dtype is dy.dtype and not accumulate)
    if dy.is_cuda and dy.dtype in _SHORT and once:
        try:
            _run_cuda(dy, x, out, accumulate)
            return
        except NotImplementedError:  # cuBLASLt has no such GEMM for this shape or GPU
            pass
    _refuse_overlap(out, dy=dy, x=x)
    if not dy.is_cuda and dy.dtype in _SHORT:
        dy, x = dy.float(), x.float()  # a CPU multiplies 16 bits slowly
    if dy.dtype in _SHORT:
        _write(torch.mm(dy.t(), x, out_dtype=torch.float32), out, accumulate)
    elif dy.dtype is not out.dtype:
        _write(torch.mm(dy.t(), x), out, accumulate)
    elif accumulate:
        out.addmm_(dy.t(), x)
    else:
        torch.mm(dy.t(), x, out=out)


def _refuse_overlap(out: torch.Tensor, **operands: torch.Tensor) -> None:
    """Raises ValueError if ``out`` shares memory with an operand; torch.mm writes while it reads.

    The kernels' own check has the same text (csrc/common/abi/op.h).
    """
    for name, operand in operands.items():
        begins = [t.data_ptr() for t in (out, operand)]
        ends = [t.data_ptr() + t.numel() * t.element_size() for t in (out, operand)]
        common = min(ends) - max(begins)
        if common > 0 and out.is_contiguous() and operand.is_contiguous():
            raise ValueError(
                f"wgrad_gemm: out must share no memory with {name}, got {common} bytes in common"
            )


def _write(product: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
    """Copies or adds a GEMM to ``out``; a sum of two dtypes is computed in the wider one."""
    if accumulate:
        out.add_(product)
    else:
        out.copy_(product)


def _run_cuda(dy: torch.Tensor, x: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
    scratch = runtime.workspace(out.device, WORKSPACE_BYTES)
    _lib.wgrad_gemm(dy.contiguous(), x.contiguous(), out, scratch, accumulate)


_multiply = bind("fp8_gemm", "wgrad_gemm", _run, without=("workspace",))
