"""Block scaling: 1x128 blocks of activations and gradients, 128x128 blocks of weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...ops.block_quantize import block_dequantize, block_quantize
from ..tensor import QuantizedTensor
from . import GemmQuantizers, QuantizerSets, stateless_sets
from .base import Quantizer
from .products import BlockGemm

if TYPE_CHECKING:
    from ...recipe import BlockScaling
    from .base import Slots

__all__ = ["BlockQuantizer", "build_quantizers"]


class BlockQuantizer(Quantizer):
    """Turns a matrix into FP8 with a scale for every block.

    Args:
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        block_rows: 1 or 128; with 1 the columnwise copy is quantized along the other axis.
        pow2: round scales down to powers of two.
        eps: smallest amax.
    """

    __slots__ = ("block_rows", "eps", "pow2")

    def __init__(self, dtype: torch.dtype, block_rows: int, pow2: bool, eps: float) -> None:
        self.dtype = dtype
        self.block_rows = block_rows
        self.pow2 = pow2
        self.eps = eps

    def quantize(
        self,
        x: torch.Tensor,
        rowwise: bool = True,
        columnwise: bool = True,
        with_dbias: bool = False,
    ) -> tuple[QuantizedTensor, torch.Tensor | None]:
        out = block_quantize(
            x, self.dtype, block_rows=self.block_rows, rowwise=rowwise, columnwise=columnwise,
            pow2=self.pow2, eps=self.eps,
        )  # fmt: skip
        return QuantizedTensor(*out, self.dtype), x.sum(0) if with_dbias else None

    def settings(self) -> tuple:
        return (*super().settings(), self.block_rows, self.pow2, self.eps)

    def quantize_rows(
        self, x: torch.Tensor, amax: torch.Tensor | None, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        made = self.quantize(x, True, False)[0]
        assert made.rowwise is not None
        assert made.rowwise_scale_inv is not None
        return made.rowwise, made.rowwise_scale_inv, None

    def _decode(self, codes: torch.Tensor, scale_inv: Any, dtype: torch.dtype) -> torch.Tensor:
        return block_dequantize(codes, scale_inv, block_rows=self.block_rows, dtype=dtype)


def build_quantizers(
    recipe: BlockScaling, slots: Slots | None, gemms: int, device: torch.device
) -> QuantizerSets:
    """One set of quantizers for every GEMM: nothing is kept."""
    formats = recipe.fp8_format.value
    options = (recipe.pow2, recipe.eps)
    inp = BlockQuantizer(formats.fwd_dtype, 1, *options)
    weight = BlockQuantizer(formats.fwd_dtype, 128, *options)
    grad = BlockQuantizer(formats.bwd_dtype, 1, *options)
    products = BlockGemm(recipe.use_split_accumulator, device)
    override = recipe.override_linear_precision[2]
    quantizers = GemmQuantizers(inp, weight, weight, grad, products, override)
    return stateless_sets(quantizers, gemms)
