"""Rowwise scaling: one scale for each row of activations and gradients, and of weights.

dgrad contracts the weight's rows, so their scales cannot be factored out of its sums. They are
folded into the output's gradient instead, before its cast: rowwise copies of gradients therefore
hold values, which ``RowwiseGemm`` casts once it knows the weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...ops._head_order import sorted_heads
from ...ops.byte_transpose import byte_transpose
from ...ops.row_products import row_scaled_product
from ...ops.row_quantize import row_quantize
from ...ops.rowwise_gemm import rowwise_gemm
from ...runtime.device import has_fp8_products
from ..tensor import QuantizedTensor
from .base import Layout, Quantizer, QuantizerSets, Repeatable, Scheme, Slots
from .gemm_backend import DGRAD, GemmBackend, IndependentRows, warn_emulated

if TYPE_CHECKING:
    from ...recipe.rowwise import RowwiseScaling


class RowwiseQuantizer(Quantizer):
    """Casts a matrix to FP8 with a scale for each row; the columnwise copy has its own."""

    __slots__ = ("bound", "eps", "scales")

    pad_columnwise = True

    def __init__(
        self, dtype: torch.dtype, scales: str, eps: float, bound: float | None = None
    ) -> None:
        self.dtype = dtype
        self.scales = scales
        self.eps = eps
        self.bound = bound

    def quantize(
        self,
        x: torch.Tensor,
        rowwise: bool = True,
        columnwise: bool = True,
        with_dbias: bool = False,
    ) -> tuple[QuantizedTensor, torch.Tensor | None]:
        values = x if self.bound is None else x.clamp(-self.bound, self.bound)
        out = row_quantize(
            values, self.dtype, rowwise=rowwise, columnwise=columnwise,
            pad_columnwise=self.pad_columnwise, scales=self.scales, eps=self.eps,
        )  # fmt: skip
        return QuantizedTensor(*out, self.dtype), x.sum(0) if with_dbias else None

    def repeatable(self) -> Repeatable:
        return Repeatable((), None)

    def settings(self) -> tuple:
        return (*super().settings(), self.scales, self.eps, self.bound)

    def cast_key(self) -> tuple | None:
        return self.dtype, self.scales, self.eps, self.bound


class RowwiseWeightQuantizer(RowwiseQuantizer):
    """Casts a weight with a scale for each row; the columnwise copy is the transposed rowwise one.

    Its scales are ``[1, rows]``, one for each column.
    """

    __slots__ = ()

    pad_columnwise = False

    def quantize(
        self,
        x: torch.Tensor,
        rowwise: bool = True,
        columnwise: bool = True,
        with_dbias: bool = False,
    ) -> tuple[QuantizedTensor, torch.Tensor | None]:
        made, sums = super().quantize(x, True, False, with_dbias)
        if columnwise:
            made.columnwise, made.columnwise_scale_inv = _transposed(made)
        if not rowwise:
            made.rowwise = made.rowwise_scale_inv = None
        return made, sums

    def sort_heads(
        self, quantized: QuantizedTensor, repeats: int, groups: int
    ) -> QuantizedTensor | None:
        rowwise, scale_inv = quantized.rowwise, quantized.rowwise_scale_inv
        assert rowwise is not None
        assert scale_inv is not None
        return QuantizedTensor(
            sorted_heads(rowwise, repeats=repeats, groups=groups),
            sorted_heads(scale_inv, repeats=repeats, groups=groups),
            quantized.columnwise,
            quantized.columnwise_scale_inv,
            self.dtype,
        )

    def quantize_rows(
        self, x: torch.Tensor, amax: torch.Tensor | None, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        made = self.quantize(x, True, False)[0]
        assert made.rowwise is not None
        assert made.rowwise_scale_inv is not None
        return made.rowwise, made.rowwise_scale_inv, None


class RowwiseGradientQuantizer(RowwiseQuantizer):
    """Casts the columnwise copy of a gradient, and leaves the rowwise one to ``RowwiseGemm``."""

    __slots__ = ()

    def quantize(
        self,
        x: torch.Tensor,
        rowwise: bool = True,
        columnwise: bool = True,
        with_dbias: bool = False,
    ) -> tuple[QuantizedTensor, torch.Tensor | None]:
        if columnwise:
            made, sums = super().quantize(x, False, True, with_dbias)
        else:
            made = QuantizedTensor(None, None, None, None, self.dtype)
            sums = x.sum(0) if with_dbias else None
        if rowwise:
            made.rowwise = x
        return made, sums

    def cast_key(self) -> None:
        return None

    def cast_rows(
        self, dy: torch.Tensor, column_scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns data and scales of the rows of ``dy`` times ``column_scale`` ``[1, out]``."""
        out = row_quantize(
            dy, self.dtype, columnwise=False, column_scale=column_scale.reshape(-1),
            scales=self.scales, eps=self.eps,
        )  # fmt: skip
        assert out.rowwise is not None
        assert out.rowwise_scale_inv is not None
        return out.rowwise, out.rowwise_scale_inv

    def _decode(self, fp8_data: torch.Tensor, scale_inv: Any, dtype: torch.dtype) -> torch.Tensor:
        return (
            fp8_data.to(dtype) if scale_inv is None else super()._decode(fp8_data, scale_inv, dtype)
        )


def _transposed(weight: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the columnwise copy of weights ``[.., rows, cols]`` and their scales."""
    assert weight.rowwise is not None
    assert weight.rowwise_scale_inv is not None
    scale_inv = weight.rowwise_scale_inv
    return byte_transpose(weight.rowwise), scale_inv.view(*scale_inv.shape[:-2], 1, -1)


class RowwiseGemm(GemmBackend):
    """Multiplies operands with a scale for each row, and casts the gradient of dgrad before."""

    __slots__ = ("device", "gradient", "native")

    gradient: RowwiseGradientQuantizer

    def __init__(self, split: tuple[bool, bool, bool], device: torch.device) -> None:
        super().__init__(split, device)
        self.device = device
        self.native = has_fp8_products(device)
        self.adds = True
        if not self.native:
            warn_emulated("FP8 matrix products", "sm_89 or later, or gfx94x or later")

    def with_independent_rows(self) -> RowwiseGemm:
        backend = IndependentRowwiseGemm(self.split, self.device)
        backend.gradient = self.gradient
        return backend

    def multiply(self, product, a, b, a_scale_inv, b_scale_inv, **options):
        if product == DGRAD:
            a, a_scale_inv = self.gradient.cast_rows(a, b_scale_inv)
            b_scale_inv = None
        return rowwise_gemm(
            a, b, a_scale_inv, b_scale_inv, use_split_accumulator=self.split[product], **options
        )


class IndependentRowwiseGemm(IndependentRows, RowwiseGemm):
    """``RowwiseGemm`` whose fprop gives a row equal bits whatever the other rows are."""

    __slots__ = ()

    rows_product = staticmethod(row_scaled_product)


class Rows(Layout):
    """Form of a stored weight with a scale for each row."""

    name = "a scale for each row"
    block_rows = 1

    def scale_inv(self, rows: int, cols: int, device: torch.device) -> torch.Tensor:
        return torch.empty((rows, 1), dtype=torch.float32, device=device)

    def columnwise_scale_inv(self, rows: int, cols: int, device: torch.device) -> torch.Tensor:
        return torch.empty((1, rows), dtype=torch.float32, device=device)

    def scales_of_file(self, rows: int, cols: int) -> tuple[int, ...]:
        return rows, 1

    def columnwise(
        self, quantizer: Any, held: QuantizedTensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _transposed(held)

    def quantize_stack(self, quantizer: Any, x: torch.Tensor) -> QuantizedTensor:
        made = quantizer.quantize(x.flatten(0, 1), True, False)[0]
        data, scale_inv = (
            t.unflatten(0, x.shape[:2]) for t in (made.rowwise, made.rowwise_scale_inv)
        )
        return QuantizedTensor(data, scale_inv, None, None, quantizer.dtype)

    def columnwise_stack(self, held: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _transposed(held)


class RowwiseScheme(Scheme):
    """Scheme of rowwise scaling, for casts and for weights that are held in FP8 only."""

    name = "rowwise"
    backend = RowwiseGemm
    layout = Rows()

    def build(
        self, recipe: Any, slots: Slots | None, gemms: int, device: torch.device
    ) -> QuantizerSets:
        sets = super().build(recipe, slots, gemms, device)
        quantizers = sets.recording[0]
        assert isinstance(quantizers.backend, RowwiseGemm)
        quantizers.backend.gradient = quantizers.grad_output
        return sets

    def gemm_quantizers(
        self, recipe: RowwiseScaling, device: torch.device
    ) -> tuple[Quantizer, Quantizer, Quantizer]:
        formats, options = recipe.fp8_format.value, (recipe.scales, recipe.eps)
        return (
            RowwiseQuantizer(formats.fwd_dtype, *options, recipe.activation_scale_ub),
            RowwiseWeightQuantizer(formats.fwd_dtype, *options),
            RowwiseGradientQuantizer(formats.bwd_dtype, *options),
        )

    def restores(self, recipe: RowwiseScaling) -> bool:
        return recipe.scales == "pow2"
