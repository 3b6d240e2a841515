"""Scheme of JitRecipeScaling: a power-of-two scale for each row of an operand."""

from __future__ import annotations

from typing import Any

import torch

from ...ops.cast_transpose import cast_transpose
from ...ops.fp8_gemm import bias_dtype
from ..tensor import QuantizedTensor, formats_of
from . import FP8Gemm, Layout, Quantizer, Scheme

__all__ = ["JitRecipeGemm", "JitRecipeQuantizer"]


class JitRecipeQuantizer(Quantizer):
    """Turns a matrix into FP8 with a scale for each row; the columnwise copy has its own rows.

    Args:
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``, or their fnuz forms.
        eps: smallest amax.
    """

    __slots__ = ("eps",)

    def __init__(self, dtype: torch.dtype, eps: float) -> None:
        self.dtype = dtype
        self.eps = eps

    def quantize(
        self,
        x: torch.Tensor,
        rowwise: bool = True,
        columnwise: bool = True,
        with_dbias: bool = False,
    ) -> tuple[QuantizedTensor, torch.Tensor | None]:
        made = QuantizedTensor(None, None, None, None, self.dtype)
        if rowwise:
            made.rowwise, made.rowwise_scale_inv = self._quantize_rows(x)
        if columnwise:
            made.columnwise, made.columnwise_scale_inv = self._quantize_rows(x.t())
        return made, x.sum(0) if with_dbias else None

    def settings(self) -> tuple:
        return (*super().settings(), self.eps)

    def _quantize_rows(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the FP8 data of ``x`` ``[rows, cols]`` and ``scale_inv`` ``[rows, 1]``."""
        values = x.float()
        amax = values.new_zeros(values.shape[0], 1)
        if values.numel():
            amax = values.abs().amax(1, keepdim=True).clamp(min=self.eps)
        scale = power_of_two(amax, torch.finfo(self.dtype).max)
        values = (values * scale).contiguous()
        out = cast_transpose(values, values.new_ones(1), self.dtype, columnwise=False)
        assert out.rowwise is not None
        # A row with an infinity reads as infinities and NaN.
        return out.rowwise, torch.where(amax.isinf(), amax, 1 / scale)


def power_of_two(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """Returns ``largest / amax`` (fp32) rounded down to a power of two.

    1 where ``amax`` is 0, infinite or NaN; at most 2^126, so that the inverse is a normal number.
    """
    ratio = (largest / amax).clamp(max=2.0**126)
    mantissa = torch.frexp(ratio)[0]  # at least 1/2, below 1
    return torch.where((amax > 0) & amax.isfinite(), ratio / (2 * mantissa), 1.0)


class JitRecipeGemm(FP8Gemm):
    """Multiplies FP8 data by the GEMMs of tensors with one scale, and scales the result."""

    __slots__ = ()

    def multiply(
        self, product: int, a: Any, b: Any, a_scale_inv: Any, b_scale_inv: Any, **options: Any
    ) -> torch.Tensor:
        one = a_scale_inv.new_ones(1)
        result = super().multiply(product, a, b, one, one, out_dtype=torch.float32)
        # Rows of a are rows of the result, rows of b its columns.
        result = result * a_scale_inv * b_scale_inv.t()
        bias, out = options.get("bias"), options.get("out")
        dtype = options["out_dtype"] if out is None else out.dtype
        if bias is not None:
            result = result + bias.to(bias_dtype(dtype))  # as all GEMMs round it
        if out is None:
            return result.to(dtype)
        plain = out.detach()  # the caller's function has the gradient
        if options.get("accumulate"):
            plain.add_(result)
        else:
            plain.copy_(result)
        return out


class JitRecipeRows(Layout):
    """Stores a weight with a power of two for each row."""

    name = "jit_recipe"
    block_rows = 1
    exact = False  # the columnwise copy has scales of its own

    def scale_inv(self, rows: int, cols: int, device: torch.device) -> torch.Tensor:
        return torch.empty((rows, 1), dtype=torch.float32, device=device)


class JitRecipeScheme(Scheme):
    """Scaling by rows, of tensors and of weights that are held in FP8 only."""

    name = "jit_recipe"
    backend = JitRecipeGemm
    layout = JitRecipeRows()

    def gemm_quantizers(
        self, recipe: Any, device: torch.device
    ) -> tuple[Quantizer, Quantizer, Quantizer]:
        formats = formats_of(recipe.fp8_format, device)
        forward = JitRecipeQuantizer(formats.fwd_dtype, recipe.eps)
        return forward, forward, JitRecipeQuantizer(formats.bwd_dtype, recipe.eps)
