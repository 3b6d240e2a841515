"""Operands of products in bf16 or fp32 that a recipe's ``backward`` names, and the product."""

from __future__ import annotations

import torch

from ...fp8.parameter.operands import dequantized
from ...fp8.parameter.parameter import FP8Parameter
from ...fp8.scheme import GemmQuantizers
from ...fp8.tensor import QuantizedTensor


def weight_values(
    quantizers: GemmQuantizers, weight: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Returns the values ``[out, in]`` by which dgrad multiplies, of a weight that was saved."""
    values = dequantized(weight)
    # What an FP8Parameter holds is what forward multiplied by.
    if quantizers.backward != "dequantized" or type(weight) is FP8Parameter:
        return values.to(dtype)
    quantizer = quantizers.weight_recast
    return quantizer.dequantize(quantizer.quantize(values.contiguous(), True, False)[0], dtype)


def input_values(
    quantizers: GemmQuantizers,
    x: torch.Tensor,
    scale_inv: torch.Tensor | None,
    dtype: torch.dtype,
    is_fp8: bool,
) -> torch.Tensor:
    """Returns the values ``[rows, in]`` of a saved input that wgrad multiplies.

    ``x`` is rowwise FP8 data with ``scale_inv`` if ``is_fp8``, else the values themselves.
    """
    quantizer = quantizers.input
    if quantizers.backward != "dequantized":
        return x
    if is_fp8:
        held = QuantizedTensor(x, scale_inv, None, None, quantizer.dtype)
    else:  # rows that were gathered before forward cast them
        held = quantizer.quantize(x, True, False)[0]
    return quantizer.dequantize(held, dtype)


def plain_product(
    dy: torch.Tensor,
    weight: torch.Tensor,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes ``dy @ weight + c`` [rows, in] in the dtype of ``dy``, into ``out`` if given."""
    found = dy @ weight if c is None else torch.addmm(c.to(dy.dtype), dy, weight)
    return found.to(out_dtype) if out is None else out.copy_(found)
