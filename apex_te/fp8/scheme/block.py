"""Block scaling: 1x128 blocks of activations and gradients, 128x128 blocks of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from ...ops import emulated_gemm
from ...ops._head_order import sorted_heads
from ...ops.block_quantize import (
    ROW_MULTIPLE,
    BlockQuantized,
    block_dequantize,
    block_quantize,
    scale_shape,
)
from ...ops.byte_transpose import byte_transpose
from ...ops.fp8_gemm import block_scaled_gemm
from ...ops.fp8_output import FP8_DTYPES
from ...ops.grouped_cast import Source, block_quantize_source
from ...ops.grouped_gemm import block_contract_groups, block_multiply_groups, multiplies_codes
from ...ops.grouped_quantize import (
    GroupedOutput,
    Groups,
    block_quantize_groups,
    block_quantize_matrices,
)
from ...ops.row_products import row_block_product
from ...runtime.device import nvidia_capability
from ..tensor import QuantizedTensor
from .base import (
    BlockOptions,
    FusedCast,
    GroupQuantizer,
    Layout,
    Matrices,
    Quantizer,
    Repeatable,
    Scheme,
)
from .gemm_backend import WGRAD, GemmBackend, IndependentRows, warn_emulated

if TYPE_CHECKING:
    from ...recipe import BlockScaling

_BLOCK = 128


class BlockQuantizer(Quantizer):
    """Casts a matrix to FP8 with a scale for each block.

    With ``block_rows=1`` the blocks of the columnwise copy (the transpose) run along its rows, too,
    unless ``columnwise_block_rows`` is 128.
    """

    __slots__ = ("block_rows", "options", "pad_columnwise")

    def __init__(
        self,
        dtype: torch.dtype,
        block_rows: int,
        scales: str,
        eps: float,
        pad_columnwise: bool = False,
        columnwise_block_rows: int | None = None,
    ) -> None:
        self.dtype = dtype
        self.block_rows = block_rows
        self.pad_columnwise = pad_columnwise
        column_rows = columnwise_block_rows or block_rows
        self.options = BlockOptions(dtype, pad_columnwise, scales, eps, column_rows)

    def quantize(
        self,
        x: torch.Tensor,
        rowwise: bool = True,
        columnwise: bool = True,
        with_dbias: bool = False,
    ) -> tuple[QuantizedTensor, torch.Tensor | None]:
        options = self.options
        out = block_quantize(
            x, options.dtype, block_rows=self.block_rows,
            columnwise_block_rows=options.columnwise_block_rows, rowwise=rowwise,
            columnwise=columnwise, pad_columnwise=options.pad_columnwise, scales=options.scales,
            eps=options.eps,
        )  # fmt: skip
        return QuantizedTensor(*out, self.dtype), x.sum(0) if with_dbias else None

    def quantize_into(self, x: torch.Tensor, out: BlockQuantized) -> None:
        """Quantizes a matrix into copies that exist."""
        options = self.options
        block_quantize(
            x, options.dtype, block_rows=self.block_rows, scales=options.scales, eps=options.eps,
            out=out,
        )  # fmt: skip

    def produce(
        self, producer: FusedCast, rowwise: bool = True, columnwise: bool = True
    ) -> QuantizedTensor:
        if self.block_rows != 1 or not producer.can_fuse_blocks or self.dtype not in FP8_DTYPES:
            return super().produce(producer, rowwise, columnwise)
        out = producer.blocks(self.options, rowwise, columnwise)
        return QuantizedTensor(*out, self.dtype)

    def repeatable(self) -> Repeatable:
        return Repeatable((), None)

    def sort_heads(
        self, quantized: QuantizedTensor, repeats: int, groups: int
    ) -> QuantizedTensor | None:
        rowwise, scale_inv = quantized.rowwise, quantized.rowwise_scale_inv
        if rowwise is None or scale_inv is None or self.block_rows != _BLOCK:
            return None
        if rowwise.shape[0] % (groups * (repeats + 2) * _BLOCK):
            return None  # a block has rows of two heads
        return QuantizedTensor(
            sorted_heads(rowwise, repeats=repeats, groups=groups),
            sorted_heads(scale_inv, repeats=repeats, groups=groups),
            quantized.columnwise,
            quantized.columnwise_scale_inv,
            self.dtype,
        )

    def settings(self) -> tuple:
        return (*self.cast_key(), self.options.columnwise_block_rows)

    def cast_key(self) -> tuple:
        return (*super().settings(), self.block_rows, self.options.scales, self.options.eps)

    def quantize_rows(
        self, x: torch.Tensor, amax: torch.Tensor | None, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        made = self.quantize(x, True, False)[0]
        assert made.rowwise is not None
        assert made.rowwise_scale_inv is not None
        return made.rowwise, made.rowwise_scale_inv, None

    def grouped(self, quantizers: Sequence[Any]) -> BlockGroupQuantizer:
        return BlockGroupQuantizer(self.options)

    def dequantize(
        self, quantized: QuantizedTensor, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        fp8_data, scale_inv = quantized.columnwise, quantized.columnwise_scale_inv
        if quantized.rowwise is not None or fp8_data is None or scale_inv is None:
            return super().dequantize(quantized, dtype)
        block_rows = self.options.columnwise_block_rows
        return block_dequantize(fp8_data, scale_inv, block_rows=block_rows, dtype=dtype).t()

    def _decode(self, fp8_data: torch.Tensor, scale_inv: Any, dtype: torch.dtype) -> torch.Tensor:
        return block_dequantize(fp8_data, scale_inv, block_rows=self.block_rows, dtype=dtype)


class BlockGroupQuantizer(GroupQuantizer):
    """Casts rows of groups in blocks of 1x128, and their weights in blocks of 128x128."""

    __slots__ = ("options",)

    def __init__(self, options: BlockOptions) -> None:
        super().__init__(options.dtype)
        self.options = options

    def quantize(
        self, x: torch.Tensor, groups: Groups, rowwise: bool = True, columnwise: bool = True
    ) -> GroupedOutput:
        return block_quantize_groups(
            x, groups, self.dtype, columnwise_block_rows=self.options.columnwise_block_rows,
            rowwise=rowwise, columnwise=columnwise, scales=self.options.scales,
            eps=self.options.eps,
        )  # fmt: skip

    def produce(
        self,
        source: Source,
        groups: Groups,
        rowwise: bool,
        columnwise: bool,
        factor_grad: torch.Tensor | None = None,
        bias_grad: torch.Tensor | None = None,
    ) -> GroupedOutput:
        return block_quantize_source(
            source, groups, self.dtype, columnwise_block_rows=self.options.columnwise_block_rows,
            rowwise=rowwise, columnwise=columnwise, scales=self.options.scales,
            eps=self.options.eps, factor_grad=factor_grad, bias_grad=bias_grad,
        )  # fmt: skip

    def produces(self, columns: int) -> bool:
        return columns % _BLOCK == 0

    def quantize_matrices(
        self,
        matrices: Matrices,
        groups: Groups | None,
        rowwise: bool = True,
        columnwise: bool = True,
        scales: Any = None,
    ) -> GroupedOutput:
        return block_quantize_matrices(
            matrices, self.dtype, groups=groups, rowwise=rowwise, columnwise=columnwise,
            scales=self.options.scales, eps=self.options.eps,
        )  # fmt: skip


class BlockGemm(GemmBackend):
    """Multiplies block-scaled operands by cuBLASLt's block-scaled GEMMs, or emulates these."""

    __slots__ = ("device", "native", "wgrad_rows")

    row_multiple = ROW_MULTIPLE

    def __init__(
        self, split: tuple[bool, bool, bool], device: torch.device, wgrad_rows: int = 1
    ) -> None:
        super().__init__(split, device)
        self.device = device
        self.wgrad_rows = wgrad_rows  # of a block of the input's columnwise copy
        self.native = device.type != "cuda" or nvidia_capability(device) == (9, 0)
        self.adds = self.native
        if not self.native:
            warn_emulated("block-scaled matrix products", "sm_90")

    def multiply(self, product, a, b, a_scale_inv, b_scale_inv, **options):
        block_rows = self.wgrad_rows if product == WGRAD else _BLOCK
        multiply = block_scaled_gemm if self.native else emulated_gemm.emulated_block_gemm
        return multiply(a, b, a_scale_inv, b_scale_inv, b_block_rows=block_rows, **options)

    def with_independent_rows(self) -> BlockGemm:
        return IndependentBlockGemm(self.split, self.device, self.wgrad_rows)

    def multiply_groups(self, product, a, b, a_scale_inv, b_scale_inv, groups):
        _check_grouped(a, b)
        return block_multiply_groups(a, a_scale_inv, b, b_scale_inv, groups)

    def contract_groups(self, a, b, a_scale_inv, b_scale_inv, groups, *rest, input_first=False):
        _check_grouped(a, b)
        operands = a, a_scale_inv, b, b_scale_inv, groups
        # Only the input has blocks of 128x128; as the first operand its scales are read one by one.
        block_rows = 1 if input_first else self.wgrad_rows
        return block_contract_groups(*operands, *rest, b_block_rows=block_rows)


class IndependentBlockGemm(IndependentRows, BlockGemm):
    """``BlockGemm`` whose fprop gives a row equal bits whatever the other rows are."""

    __slots__ = ()

    rows_product = staticmethod(row_block_product)


def _check_grouped(a: torch.Tensor, b: torch.Tensor) -> None:
    """Warns if block-scaled GEMMs of groups are emulated."""
    if not multiplies_codes(a, b):
        what = "block-scaled matrix products of groups whose sizes are on the device"
        warn_emulated(what, "sm_90 and sizes that are multiples of 16")


def _wgrad_rows(recipe: BlockScaling) -> int:
    return _BLOCK if recipe.wgrad_input == "128x128" else 1


class Blocks(Layout):
    """Form of a stored weight with a scale for each 128x128 block."""

    name = "128x128 blocks"
    block_rows = _BLOCK
    block_cols = _BLOCK

    def scale_inv(self, rows: int, cols: int, device: torch.device) -> torch.Tensor:
        return torch.empty(scale_shape(rows, cols, _BLOCK), dtype=torch.float32, device=device)

    def scales_of_file(self, rows: int, cols: int) -> tuple[int, ...]:
        return -(-rows // _BLOCK), -(-cols // _BLOCK)

    def columnwise(
        self, quantizer: Any, held: QuantizedTensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.columnwise_stack(held)

    def quantize_stack(self, quantizer: Any, x: torch.Tensor) -> QuantizedTensor:
        out = quantizer.grouped((quantizer,)).quantize_matrices(x, None, True, False)
        return QuantizedTensor(out.rowwise, out.row_scale_inv, None, None, quantizer.dtype)

    def columnwise_stack(self, held: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert held.rowwise is not None
        assert held.rowwise_scale_inv is not None
        blocks = -(-held.rowwise.shape[-1] // _BLOCK)
        scale_inv = held.rowwise_scale_inv[..., :blocks].transpose(-2, -1)
        padding = (0, -scale_inv.shape[-1] % 4)
        scale_inv = functional.pad(scale_inv, padding, value=1.0).contiguous()
        return byte_transpose(held.rowwise), scale_inv


class BlockScheme(Scheme):
    """Scheme of block scaling."""

    name = "block"
    backend = BlockGemm
    layout = Blocks()

    def gemm_quantizers(
        self, recipe: BlockScaling, device: torch.device
    ) -> tuple[Quantizer, Quantizer, Quantizer]:
        formats, options = recipe.fp8_format.value, (recipe.scales, recipe.eps)
        columns = _wgrad_rows(recipe)
        inp = BlockQuantizer(formats.fwd_dtype, 1, *options, True, columns)
        weight = BlockQuantizer(formats.fwd_dtype, _BLOCK, *options)
        grad_output = BlockQuantizer(formats.bwd_dtype, 1, *options, pad_columnwise=True)
        return inp, weight, grad_output

    def gemm_backend(self, recipe: BlockScaling, device: torch.device) -> BlockGemm:
        return BlockGemm(recipe.use_split_accumulator, device, _wgrad_rows(recipe))

    def restores(self, recipe: BlockScaling) -> bool:
        return recipe.scales == "pow2"
