"""GEMMs of FP8 operands for devices without matrix units for the operands' format.

The formats: MXFP8 (no matrix units before sm_100), HiF8 (none anywhere), FP8 with one scale for
each tensor (none before sm_89) and FP8 with a scale for each block (on sm_90 alone).

Operands are decoded and multiplied by ``torch.mm``. On a GPU they are decoded to bfloat16, which
holds their values exactly. They are decoded to float32 on the CPU, where GEMMs in bfloat16 are
slow, and in block scaling, where a value times its scale need not fit in bfloat16.
"""

from __future__ import annotations

import torch

from ..runtime.named_arguments import find_former_functions
from . import gemm_common, hif8
from .binding import bind_call, check_dense, checked
from .block_quantize import block_dequantize
from .gemm_common import bias_dtype, float32_product, product_into
from .mx_quantize import mx_dequantize

_OUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@checked
def mx_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    """Computes out[M, N] = a @ b.T + bias of MXFP8 operands as ``mx_quantize`` makes them.

    Decoding may round operands' values below 2^-126, the smallest normal number.

    Args:
        a: [M, K] FP8. fprop: x; dgrad: dy; wgrad: the columnwise copy of dy.
        b: [N, K] FP8. fprop: the weight; dgrad and wgrad: the columnwise copies of the weight
            and x.
        a_scale: [M, ceil(K / 32)] float8_e8m0fnu.
        b_scale: [N, ceil(K / 32)] float8_e8m0fnu.
        out: [M, N] float32, float16 or bfloat16 to write; a new tensor unless given.
        out_dtype: dtype of the new tensor if ``out`` is not given.
        bias: [N], converted to out's dtype, or to bfloat16 for a float32 out.
        accumulate: add the result to ``out``, which must be given, instead of overwriting it.

    Returns:
        The output [M, N]: ``out`` or the new tensor.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: the shape or device of an argument does not match.
    """
    out, bias = _prepare("mx_gemm", a, b, a_scale, b_scale, out, out_dtype, bias, accumulate)
    return _issue("mx", a, b, a_scale, b_scale, out, bias, accumulate)


@checked
def hif8_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    """Computes out[M, N] = (a @ b.T) * a_scale_inv * b_scale_inv + bias of HiF8 data.

    Args:
        a: [M, K] uint8 HiF8 data. fprop: x; dgrad: dy; wgrad: the columnwise copy of dy.
        b: [N, K] uint8 HiF8 data. fprop: the weight; dgrad and wgrad: the columnwise copies of
            the weight and x.
        a_scale_inv: one float32 element on the device.
        b_scale_inv: one float32 element on the device.
        out: [M, N] float32, float16 or bfloat16 to write; a new tensor unless given.
        out_dtype: dtype of the new tensor if ``out`` is not given.
        bias: [N], converted to out's dtype, or to bfloat16 for a float32 out.
        accumulate: add the result to ``out``, which must be given, instead of overwriting it.

    Returns:
        The output [M, N]: ``out`` or the new tensor.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: the shape or device of an argument does not match.
    """
    out, bias = _prepare(
        "hif8_gemm", a, b, a_scale_inv, b_scale_inv, out, out_dtype, bias, accumulate
    )
    for name, scale_inv in (("a_scale_inv", a_scale_inv), ("b_scale_inv", b_scale_inv)):
        if scale_inv.numel() != 1:
            raise ValueError(
                f"hif8_gemm: {name} must have one element, got {list(scale_inv.shape)}"
            )
    return _issue("hif8", a, b, a_scale_inv, b_scale_inv, out, bias, accumulate)


@checked
def emulated_fp8_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    """Computes ``fp8_gemm`` without FP8 matrix units, by decoding the operands.

    Unlike ``fp8_gemm``, it supports two E5M2 operands.

    Args:
        a: [M, K] FP8.
        b: [N, K] FP8.
        a_scale_inv, b_scale_inv: one float32 element each, on the device.
        out: [M, N] float32, float16 or bfloat16 to write; a new tensor unless given.
        out_dtype: dtype of the new tensor if ``out`` is not given.
        bias: [N], converted to out's dtype, or to bfloat16 for a float32 out.
        accumulate: add the result to ``out``, which must be given, instead of overwriting it.

    Returns:
        The output [M, N]: ``out`` or the new tensor.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: the shape or device of an argument does not match.
    """
    out, bias = _prepare(
        "emulated_fp8_gemm", a, b, a_scale_inv, b_scale_inv, out, out_dtype, bias, accumulate
    )
    for operand, codes in (("a", a), ("b", b)):
        if codes.element_size() != 1:
            actual = str(codes.dtype).removeprefix("torch.")
            raise TypeError(
                f"emulated_fp8_gemm: {operand} must have a dtype of one byte, got {actual}"
            )
    return _issue("fp8", a, b, a_scale_inv, b_scale_inv, out, bias, accumulate)


@checked
def emulated_block_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    *,
    a_block_rows: int = 1,
    b_block_rows: int = 128,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    """Computes ``block_scaled_gemm`` without FP8 matrix units, in float32.

    Unlike ``block_scaled_gemm``, it supports two E5M2 operands and every pair of ``block_rows``.

    Args:
        a: [M, K] FP8.
        b: [N, K] FP8.
        a_scale_inv: float32 of shape block_quantize.scale_shape(M, K, a_block_rows).
        b_scale_inv: float32 of shape block_quantize.scale_shape(N, K, b_block_rows).
        a_block_rows, b_block_rows: 1 (blocks of 1x128) or 128 (128x128).
        out: [M, N] float32, float16 or bfloat16 to write; a new tensor unless given.
        out_dtype: dtype of the new tensor if ``out`` is not given.
        bias: [N], converted to out's dtype, or to bfloat16 for a float32 out.
        accumulate: add the result to ``out``, which must be given, instead of overwriting it.

    Returns:
        The output [M, N]: ``out`` or the new tensor.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: the shape or device of an argument does not match.
    """
    out, bias = _prepare(
        "emulated_block_gemm", a, b, a_scale_inv, b_scale_inv, out, out_dtype, bias, accumulate
    )
    kind = f"block {a_block_rows} {b_block_rows}"
    return _issue(kind, a, b, a_scale_inv, b_scale_inv, out, bias, accumulate)


def _prepare(name, a, b, a_scale, b_scale, out, out_dtype, bias, accumulate):
    """Checks what all formats share; returns ``out`` [M, N] and the bias in its dtype, or None."""
    check_dense(name, a=a, b=b, a_scale=a_scale, b_scale=b_scale, out=out, bias=bias)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(
            f"{name}: a and b must be [M, K] and [N, K], got {list(a.shape)} and {list(b.shape)}"
        )
    shape = [a.shape[0], b.shape[0]]
    if out is None and accumulate:
        raise ValueError(f"{name}: out must be given with accumulate, got None")
    if out is not None and list(out.shape) != shape:
        raise ValueError(f"{name}: out must have shape {shape}, got {list(out.shape)}")
    dtype = out_dtype if out is None else out.dtype
    if dtype not in _OUT_DTYPES:
        actual = str(dtype).removeprefix("torch.")
        raise TypeError(f"{name}: out must have dtype float32, float16 or bfloat16, got {actual}")
    if bias is not None and list(bias.shape) != shape[1:]:
        raise ValueError(f"{name}: bias must have shape {shape[1:]}, got {list(bias.shape)}")
    if bias is not None and bias.is_complex():
        raise TypeError(f"{name}: bias must have a real dtype, got {bias.dtype}")
    bias = None if bias is None else bias.to(bias_dtype(dtype))
    return (a.new_empty(shape, dtype=dtype) if out is None else out), bias


def _issue(kind, a, b, a_scale, b_scale, out, bias, accumulate):
    """Runs the GEMM as one registered op, whose rounding a compiler cannot change.

    ``kind`` is "mx", "hif8", "fp8", or "block" and the block rows of a and b, e.g. "block 1 128".
    """
    if kind == "mx" and torch.compiler.is_compiling():  # inductor does not support float8_e8m0fnu
        a_scale, b_scale = a_scale.view(torch.uint8), b_scale.view(torch.uint8)
    _multiply(kind, a, b, a_scale, b_scale, out, bias, accumulate)
    return out


def _run(kind, a, b, a_scale, b_scale, out, bias, accumulate):
    gemm_common.count_gemms()
    # A GEMM in bfloat16 would be slow on the CPU, and in blocks inexact for any scale.
    dtype = torch.bfloat16 if a.is_cuda else torch.float32
    scale = None
    if kind == "mx":
        a, b = (
            mx_dequantize(x, s.view(torch.float8_e8m0fnu), dtype=dtype)
            for x, s in ((a, a_scale), (b, b_scale))
        )
    elif kind.startswith("block"):
        rows = (int(n) for n in kind.split()[1:])
        a, b = (
            block_dequantize(x, s, block_rows=n, dtype=torch.float32)
            for x, s, n in zip((a, b), (a_scale, b_scale), rows, strict=True)
        )
    else:
        scale = a_scale * b_scale
        a, b = (hif8.decode(x, dtype) if kind == "hif8" else x.to(dtype) for x in (a, b))
    if out.dtype is a.dtype and scale is None and bias is None and not accumulate:
        product_into(a, b.t(), out)
        return
    # Whatever follows the GEMM works on its float32 sums, which are rounded once.
    if a.dtype is torch.float32:
        product = float32_product(a, b.t())
    else:
        product = torch.mm(a, b.t(), out_dtype=torch.float32)
    # Not in place: a selective checkpoint may have saved the product.
    if scale is not None:
        product = product * scale
    if bias is not None:
        product = product + bias
    if accumulate:
        out.add_(product)
    else:
        out.copy_(product)


_multiply = bind_call(
    "emulated_gemm(str kind, Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor(a!) out, "
    "Tensor? bias, bool accumulate) -> ()",
    _run,
)

__getattr__ = find_former_functions(
    __name__, {"decoded_block_gemm": "emulated_block_gemm", "decoded_fp8_gemm": "emulated_fp8_gemm"}
)
