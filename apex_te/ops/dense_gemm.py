"""FP8 GEMMs by the suite's own kernel for sm_90; by ``fp8_gemm`` on other devices.

Modules multiply by ``fp8_gemm``: on an H200 under load, for the GEMMs of Llama-3-8B's and GPT's
layers, this kernel reached 0.95 of the speed of cuBLASLt's best algorithm with fast sums (at least
0.91), and 0.985 with split ones (2026-11-22). Its gain is in what ``dense_gemm_swiglu`` fuses.
"""

from __future__ import annotations

import torch

from .. import runtime
from ..runtime.device import nvidia_capability
from . import fp8_gemm, gemm_common
from .binding import bind, checked, note_written
from .fp8_output import FP8_DTYPES
from .gemm_common import check_operands, prepare

__all__ = ["dense_gemm", "has_dense_fp8", "multiplies", "multiply_into", "reference"]

_lib = runtime.ops("dense_gemm")

_OUT = (torch.bfloat16, torch.float32)
PROMOTIONS = (128, 256, 512)
STREAM_RESULTS = 4  # `cache` of the kernels: operands stay in the L2 cache rather than results


def has_dense_fp8(device: torch.device) -> bool:
    """Returns True if the suite has a kernel for GEMMs of FP8 data on the device."""
    return nvidia_capability(device) == (9, 0)


@checked
def dense_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    accumulate: bool = False,
    use_split_accumulator: bool = False,
    promotion: int = 512,
) -> torch.Tensor:
    """Computes out[M, N] = (a[M, K] @ b[N, K].T) * a_scale_inv * b_scale_inv + bias + residual.

    Bias and residual are optional, and added in float32.

    Args:
        a: [M, K] FP8, contiguous. fprop: x; dgrad: dy; wgrad: the columnwise copy of dy.
        b: [N, K] FP8, contiguous. fprop: the weight; dgrad and wgrad: the columnwise copies of the
            weight and x.
        a_scale_inv: one float32 element on the device.
        b_scale_inv: one float32 element on the device.
        out: [M, N] to write, in a dtype listed for ``out_dtype``; a new tensor unless given.
        out_dtype: dtype of a new tensor: bfloat16 or float32.
        bias: [N], converted to bfloat16.
        residual: [M, N] bfloat16, contiguous; not with ``accumulate``.
        accumulate: add the result to ``out``, which must be given, instead of overwriting it.
        use_split_accumulator: add partial sums of ``promotion`` terms in float32 (slower, more
            exact); a CPU always adds in float32.
        promotion: 128, 256 or 512 terms along K; fewer are more exact and slower.

    Returns:
        The output [M, N]: ``out`` or the new tensor.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: the shape or device of an argument does not match, ``promotion`` has another
            value, or ``residual`` and ``accumulate`` are both given.
        NotImplementedError: both operands are E5M2, or the GPU has no FP8 matrix units (below
            sm_89).
    """
    check_operands("dense_gemm", a, b)
    is_given = out is not None
    out, bias = prepare("dense_gemm", a, b, out, out_dtype, bias, accumulate)
    if out.dtype not in _OUT:
        raise TypeError(f"dense_gemm: out must have dtype bfloat16 or float32, got {out.dtype}")
    if promotion not in PROMOTIONS:
        raise ValueError(f"dense_gemm: promotion must be 128, 256 or 512, got {promotion}")
    if residual is not None:
        _check_residual(residual, out, accumulate)
    every = promotion if use_split_accumulator else 0
    _multiply(a, b, a_scale_inv, b_scale_inv, out, bias, residual, accumulate, every)
    if is_given:
        note_written(out)
    return out


def _check_residual(residual: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
    """Checks that ``residual`` is bfloat16 of the shape of ``out``, without ``accumulate``."""
    if accumulate:
        raise ValueError("dense_gemm: accumulate must be False with residual, got True")
    if residual.dtype is not torch.bfloat16:
        raise TypeError(f"dense_gemm: residual must have dtype bfloat16, got {residual.dtype}")
    if residual.shape != out.shape:
        raise ValueError(
            f"dense_gemm: residual must have shape {list(out.shape)}, got {list(residual.shape)}"
        )


def multiplies(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns True if the suite's kernel multiplies the operands, False if ``fp8_gemm`` does.

    The kernel needs sm_90. Rows of the operands and the result must begin at multiples of 16 bytes.

    Args:
        a: FP8 operand [M, K].
        b: FP8 operand [N, K].
    """
    if a.dtype not in FP8_DTYPES or b.dtype not in FP8_DTYPES or not has_dense_fp8(a.device):
        return False
    return a.shape[1] % 16 == 0 and b.shape[0] % 8 == 0 and not (a.data_ptr() | b.data_ptr()) % 16


def reads_bias(bias: torch.Tensor | None) -> bool:
    """Returns True if the suite's kernels can read ``bias``, which they do in pairs."""
    return bias is None or bias.data_ptr() % 4 == 0


def multiply_into(a, b, a_scale_inv, b_scale_inv, out, bias, residual, accumulate, promotion):
    """Computes ``dense_gemm`` into ``out`` without checking the arguments.

    Args:
        a, b, a_scale_inv, b_scale_inv, out, bias, residual, accumulate: as in ``dense_gemm``; a
            bias must be bfloat16.
        promotion: number of products along K that are summed before float32; 0: all of K.
    """
    results = out.data_ptr() | (0 if residual is None else residual.data_ptr())
    if multiplies(a, b) and results % 16 == 0 and reads_bias(bias):
        gemm_common.count_gemms()
        _lib.dense_gemm(
            a, b, a_scale_inv, b_scale_inv, out, bias, residual, accumulate, promotion, 0, 0,
            STREAM_RESULTS,
        )  # fmt: skip
        return
    # GEMMs in float32, so that a residual is added before rounding.
    total = out if residual is None else torch.empty_like(out, dtype=torch.float32)
    fp8_gemm.multiply_into(
        a, b, a_scale_inv, b_scale_inv, total, bias, None, None, accumulate, promotion > 0
    )
    if residual is not None:
        torch.add(total, residual, out=total)
        out.copy_(total)


def reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes ``dense_gemm`` in float64 from the decoded operands; returns [M, N].

    Args:
        a, b, a_scale_inv, b_scale_inv, bias, residual: as in ``dense_gemm``.
    """
    return fp8_gemm.reference(a, b, a_scale_inv, b_scale_inv, bias=bias, c=residual)


_multiply = bind("dense_gemm", "dense_gemm", multiply_into, without=("columns", "strip", "cache"))
