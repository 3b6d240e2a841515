"""MXFP8: a power-of-two scale for every 32 elements; both copies are cast from high precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...ops import emulated_gemm
from ...ops.mx_quantize import mx_dequantize, mx_quantize
from ..tensor import QuantizedTensor
from .base import Layout, Quantizer, Scheme
from .gemm_backend import GemmBackend, warn_emulated

if TYPE_CHECKING:
    from ...recipe import MXFP8Scaling

_BLOCK = 32  # elements with one scale


class MXQuantizer(Quantizer):
    """Casts a matrix to MXFP8, with a power-of-two scale for every 32 elements."""

    __slots__ = ("pad_columnwise", "rounding")

    def __init__(self, dtype: torch.dtype, rounding: str, pad_columnwise: bool = False) -> None:
        self.dtype = dtype
        self.rounding = rounding
        self.pad_columnwise = pad_columnwise

    def quantize(
        self,
        x: torch.Tensor,
        rowwise: bool = True,
        columnwise: bool = True,
        with_dbias: bool = False,
    ) -> tuple[QuantizedTensor, torch.Tensor | None]:
        out = mx_quantize(
            x, self.dtype, rowwise=rowwise, columnwise=columnwise,
            pad_columnwise=self.pad_columnwise, rounding=self.rounding,
        )  # fmt: skip
        return QuantizedTensor(*out, self.dtype), x.sum(0) if with_dbias else None

    def cast_key(self) -> tuple:
        return (*self.settings(), self.rounding)

    def _decode(self, fp8_data: torch.Tensor, scale_inv: Any, dtype: torch.dtype) -> torch.Tensor:
        return mx_dequantize(fp8_data, scale_inv, dtype=dtype)


class MXGemm(GemmBackend):
    """Emulates GEMMs of MXFP8 operands."""

    __slots__ = ()

    def __init__(self, split: tuple[bool, bool, bool], device: torch.device) -> None:
        super().__init__(split, device)
        if device.type == "cuda":
            warn_emulated("MXFP8 matrix products", "sm_100, which is not supported yet")

    def multiply(self, product, a, b, a_scale_inv, b_scale_inv, **options):
        return emulated_gemm.mx_gemm(a, b, a_scale_inv, b_scale_inv, **options)


class MXBlocks(Layout):
    """Form of a stored weight with a power-of-two scale for every 32 elements of a row."""

    name = "MXFP8"
    block_rows = 1
    block_cols = _BLOCK
    exact = False  # columnwise blocks lie along the other axis
    decoded = torch.bfloat16

    def scale_inv(self, rows: int, cols: int, device: torch.device) -> torch.Tensor:
        shape = (rows, -(-cols // _BLOCK))
        return torch.empty(shape, dtype=torch.float8_e8m0fnu, device=device)


class MXScheme(Scheme):
    """Scheme of MXFP8 scaling, for casts and for weights that are held in FP8 only."""

    name = "mx"
    backend = MXGemm
    layout = MXBlocks()
    row_alignment = _BLOCK

    def gemm_quantizers(
        self, recipe: MXFP8Scaling, device: torch.device
    ) -> tuple[Quantizer, Quantizer, Quantizer]:
        formats = recipe.fp8_format.value
        inp = MXQuantizer(formats.fwd_dtype, recipe.rounding, pad_columnwise=True)
        weight = MXQuantizer(formats.fwd_dtype, recipe.rounding)
        grad_output = MXQuantizer(formats.bwd_dtype, recipe.rounding, pad_columnwise=True)
        return inp, weight, grad_output
