"""How each scheme keeps a weight of which there is no high-precision copy.

The values of such a weight are those of its rowwise codes. Writing the values back gives the same
codes and scales, or ones of the same values, in whichever dtype they were read: what is saved as
values and loaded again is what it was.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch.nn import functional

from ...ops import hif8
from ...ops.block_quantize import scale_shape
from ...ops.byte_transpose import byte_transpose
from ...ops.cast_transpose import cast_transpose
from ...ops.current_scale import current_scale, tensor_amax
from ...recipe import BlockScaling, CurrentScaling, Format, MXFP8Scaling
from ..tensor import QuantizedTensor

if TYPE_CHECKING:
    from ...recipe import DelayedScaling, Recipe

__all__ = ["Layout", "layout_of", "pack_recipe", "stored_recipe", "unpack_recipe"]

_BLOCK = 128
_MX_BLOCK = 32


class Layout:
    """Codes and scales of a stored weight [rows, cols]; a subclass defines the scheme.

    Attributes:
        name: the scheme's.
        block_rows: rows that share a scale; 0 where all do.
        exact: the columnwise codes made of the rowwise ones are those made of the values.
    """

    name: ClassVar[str]
    block_rows: ClassVar[int]
    exact: ClassVar[bool] = True

    def scale_inv(self, rows: int, cols: int, device: torch.device) -> torch.Tensor:
        """Inverse scales without values."""
        raise NotImplementedError

    def quantize(self, quantizer: Any, x: torch.Tensor) -> QuantizedTensor:
        """Rowwise codes of ``x`` by the weight quantizer of the scheme."""
        return quantizer.quantize(x, True, False)[0]

    def columnwise(
        self, quantizer: Any, held: QuantizedTensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The columnwise codes and their scales."""
        raise NotImplementedError

    def rows(self, held: QuantizedTensor, start: int, stop: int) -> QuantizedTensor | None:
        """Rows as views; None where they would cut a block."""
        codes, scale_inv, block = held.rowwise, held.rowwise_scale_inv, self.block_rows
        assert codes is not None
        assert scale_inv is not None
        if block:
            if start % block or (stop % block and stop != codes.shape[0]):
                return None
            scale_inv = scale_inv[start // block : -(-stop // block)]
        return QuantizedTensor(codes[start:stop], scale_inv, None, None, held.dtype)

    def joined(self, parts: list[QuantizedTensor]) -> QuantizedTensor | None:
        """The rows of ``parts`` as one, of copied codes; None where they cut a block.

        Parts with one scale for all have the same one.
        """
        dtype = parts[0].dtype
        codes: list[torch.Tensor] = []
        scales: list[torch.Tensor] = []
        for part in parts:
            assert part.rowwise is not None
            assert part.rowwise_scale_inv is not None
            if self.block_rows and codes and codes[-1].shape[0] % self.block_rows:
                return None
            codes.append(part.rowwise.view(torch.uint8))
            scales.append(part.rowwise_scale_inv)
        scale_inv = torch.cat(scales) if self.block_rows else scales[0]
        return QuantizedTensor(torch.cat(codes).view(dtype), scale_inv, None, None, dtype)

    def gathered(
        self, codes: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype
    ) -> QuantizedTensor:
        """The weight of shards whose ``codes`` [rows, cols] and scales were put together."""
        return QuantizedTensor(codes, scale_inv, None, None, dtype)


class OneScale(Layout):
    """One scale for all, from an amax rounded to bfloat16.

    The amax of the values, in whichever dtype they are read, then rounds to the same again.
    """

    name = "one scale"
    block_rows = 0

    def scale_inv(self, rows: int, cols: int, device: torch.device) -> torch.Tensor:
        return torch.empty(1, dtype=torch.float32, device=device)

    def quantize(self, quantizer: Any, x: torch.Tensor) -> QuantizedTensor:
        out = self._cast(quantizer, x, tensor_amax(x).bfloat16().float())
        return QuantizedTensor(out.rowwise, out.scale_inv, None, None, quantizer.dtype)

    def columnwise(
        self, quantizer: Any, held: QuantizedTensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert held.rowwise_scale_inv is not None
        return _transposed_codes(held), held.rowwise_scale_inv

    def gathered(
        self, codes: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype
    ) -> QuantizedTensor:
        """Shards that were written apart have scales of their own.

        Their codes are written again for the largest, which changes nothing where they are equal.
        """
        shards = scale_inv.numel()
        if shards > 1:
            common = scale_inv.amax().reshape(1)
            for part, own in zip(codes.chunk(shards), scale_inv.split(1), strict=True):
                self._rescale(part, own / common)
            scale_inv = common
        return QuantizedTensor(codes, scale_inv, None, None, dtype)

    def _cast(self, quantizer: Any, x: torch.Tensor, amax: torch.Tensor) -> Any:
        return current_scale(
            x, quantizer.dtype, columnwise=False, eps=quantizer.eps, pow2=quantizer.pow2, amax=amax
        )

    def _rescale(self, codes: torch.Tensor, factor: torch.Tensor) -> None:
        values = codes.to(torch.float32)
        cast_transpose(values, factor, codes.dtype, columnwise=False, out_rowwise=codes)


class HiF8OneScale(OneScale):
    """One scale for all HiF8 codes."""

    def _cast(self, quantizer: Any, x: torch.Tensor, amax: torch.Tensor) -> Any:
        return hif8.quantize_current(
            x, quantizer.target, columnwise=False, eps=quantizer.eps, pow2=quantizer.pow2, amax=amax
        )

    def _rescale(self, codes: torch.Tensor, factor: torch.Tensor) -> None:
        values = hif8.decode(codes, torch.float32)
        hif8.quantize(values, factor, columnwise=False, out_rowwise=codes)


class Blocks(Layout):
    """A scale for each 128x128 block, a power of two."""

    name = "128x128 blocks"
    block_rows = _BLOCK

    def scale_inv(self, rows: int, cols: int, device: torch.device) -> torch.Tensor:
        return torch.empty(scale_shape(rows, cols, _BLOCK), dtype=torch.float32, device=device)

    def columnwise(
        self, quantizer: Any, held: QuantizedTensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert held.rowwise is not None
        assert held.rowwise_scale_inv is not None
        blocks = -(-held.rowwise.shape[1] // _BLOCK)
        scale_inv = held.rowwise_scale_inv[:, :blocks].t()
        padding = (0, -scale_inv.shape[1] % 4)
        return _transposed_codes(held), functional.pad(scale_inv, padding, value=1.0).contiguous()


class MXBlocks(Layout):
    """A power of two for each 32 elements of a row."""

    name = "MXFP8"
    block_rows = 1
    exact = False

    def scale_inv(self, rows: int, cols: int, device: torch.device) -> torch.Tensor:
        shape = (rows, -(-cols // _MX_BLOCK))
        return torch.empty(shape, dtype=torch.float8_e8m0fnu, device=device)

    def columnwise(
        self, quantizer: Any, held: QuantizedTensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Blocks lie along the other axis: the values, exact in bfloat16, are quantized again.
        made = quantizer.quantize(quantizer.dequantize(held, torch.bfloat16), False, True)[0]
        assert made.columnwise is not None
        assert made.columnwise_scale_inv is not None
        return made.columnwise, made.columnwise_scale_inv


def _transposed_codes(held: QuantizedTensor) -> torch.Tensor:
    assert held.rowwise is not None
    return byte_transpose(held.rowwise)


_LAYOUTS: dict[str, Layout] = {
    "current": OneScale(),
    "hif8": HiF8OneScale(),
    "block": Blocks(),
    "mx": MXBlocks(),
}


def layout_of(recipe: Recipe) -> Layout:
    """How weights of a ``stored_recipe`` are kept."""
    return _LAYOUTS[recipe.quantizer]


def stored_recipe(recipe: Recipe) -> Recipe:
    """The recipe by which a weight is quantized whenever it is written.

    A recipe that keeps state scales by earlier amaxes; a weight that is written once a step, from
    its master value, is scaled by its own. The scales of blocks are powers of two.
    """
    if recipe.keeps_state:
        delayed = cast("DelayedScaling", recipe)
        pow2 = delayed.scaling_factor_compute_algo == "pow2"
        return CurrentScaling(fp8_format=delayed.fp8_format, pow2=pow2)
    if recipe.quantizer == "block":
        return dataclasses.replace(cast(BlockScaling, recipe), pow2=True)
    return recipe


_STORED = {kind.__name__: kind for kind in (CurrentScaling, BlockScaling, MXFP8Scaling)}


def pack_recipe(recipe: Recipe) -> tuple[str, dict[str, Any]]:
    """A ``stored_recipe`` as plain values."""
    names = [field.name for field in dataclasses.fields(recipe)]
    fields: dict[str, Any] = {name: getattr(recipe, name) for name in names}
    fields["fp8_format"] = fields["fp8_format"].name
    return type(recipe).__name__, fields


def unpack_recipe(packed: Any) -> Recipe:
    """The recipe that ``pack_recipe`` was given; ValueError for anything else."""
    try:
        name, fields = packed
        return _STORED[name](**dict(fields, fp8_format=Format[fields["fp8_format"]]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"FP8Parameter: recipe must be what was saved, got {error!r}") from error
