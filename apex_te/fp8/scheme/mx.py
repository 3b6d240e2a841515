"""MXFP8: a power-of-two scale for every 32 elements, both layouts from high precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...ops.mx_quantize import mx_dequantize, mx_quantize
from ..tensor import QuantizedTensor
from . import GemmQuantizers, QuantizerSets, stateless_sets
from .base import Quantizer
from .products import MXGemm

if TYPE_CHECKING:
    from ...recipe import MXFP8Scaling
    from .base import Slots

__all__ = ["MXQuantizer", "build_quantizers"]


class MXQuantizer(Quantizer):
    """Turns a matrix into MXFP8.

    Args:
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        rounding: of the scale's exponent, ``"up"`` or ``"floor"``.
    """

    __slots__ = ("rounding",)

    def __init__(self, dtype: torch.dtype, rounding: str) -> None:
        self.dtype = dtype
        self.rounding = rounding

    def quantize(
        self,
        x: torch.Tensor,
        rowwise: bool = True,
        columnwise: bool = True,
        with_dbias: bool = False,
    ) -> tuple[QuantizedTensor, torch.Tensor | None]:
        out = mx_quantize(
            x, self.dtype, rowwise=rowwise, columnwise=columnwise, rounding=self.rounding
        )
        return QuantizedTensor(*out, self.dtype), x.sum(0) if with_dbias else None

    def _decode(self, codes: torch.Tensor, scale_inv: Any, dtype: torch.dtype) -> torch.Tensor:
        return mx_dequantize(codes, scale_inv, dtype=dtype)


def build_quantizers(
    recipe: MXFP8Scaling, slots: Slots | None, gemms: int, device: torch.device
) -> QuantizerSets:
    """One set of quantizers for every GEMM: nothing is kept."""
    formats = recipe.fp8_format.value
    forward = MXQuantizer(formats.fwd_dtype, recipe.rounding)
    backward = MXQuantizer(formats.bwd_dtype, recipe.rounding)
    products = MXGemm(recipe.use_split_accumulator, device)
    override = recipe.override_linear_precision[2]
    quantizers = GemmQuantizers(forward, forward, forward, backward, products, override)
    return stateless_sets(quantizers, gemms)
