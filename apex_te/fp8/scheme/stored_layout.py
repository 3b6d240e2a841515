"""Forms in which weights that are held in FP8 only are stored."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ..tensor import QuantizedTensor


class Layout:
    """Form in which a scheme stores a weight ``[rows, cols]`` in FP8 only: rowwise data and scales.

    Reading the values in any dtype and quantizing them again gives equal values, so that a weight
    is unchanged if its values are saved and loaded.

    Attributes:
        block_rows, block_cols: number of rows and columns that share a scale; 0 if all do.
        exact: True if the values give the same columnwise data as the original weight.
        decoded: dtype that represents the values exactly; columnwise data are made from it.
    """

    name: ClassVar[str]
    block_rows: ClassVar[int]
    block_cols: ClassVar[int] = 0
    exact: ClassVar[bool] = True
    decoded: ClassVar[torch.dtype] = torch.float32

    def scale_inv(self, rows: int, cols: int, device: torch.device) -> torch.Tensor:
        """Returns an uninitialized ``scale_inv`` for a weight ``[rows, cols]``."""
        raise NotImplementedError

    def quantize(self, quantizer: Any, x: torch.Tensor) -> QuantizedTensor:
        """Returns the rowwise copy of ``x`` ``[rows, cols]``."""
        return quantizer.quantize(x, True, False)[0]

    def quantize_part(self, quantizer: Any, x: torch.Tensor, amax: torch.Tensor) -> QuantizedTensor:
        """Returns the rowwise copy of a part of a weight, with the amax of the whole weight."""
        raise NotImplementedError

    def columnwise(
        self, quantizer: Any, held: QuantizedTensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the columnwise data ``[cols, rows]`` and ``scale_inv`` of a stored weight."""
        made = quantizer.quantize(quantizer.dequantize(held, self.decoded), False, True)[0]
        assert made.columnwise is not None
        assert made.columnwise_scale_inv is not None
        return made.columnwise, made.columnwise_scale_inv

    def rows(self, held: QuantizedTensor, start: int, stop: int) -> QuantizedTensor | None:
        """Returns views of rows ``start`` to ``stop - 1``; None if the rows cut a block."""
        fp8_data, scale_inv, block = held.rowwise, held.rowwise_scale_inv, self.block_rows
        assert fp8_data is not None
        assert scale_inv is not None
        if block:
            if start % block or (stop % block and stop != fp8_data.shape[0]):
                return None
            scale_inv = scale_inv[start // block : -(-stop // block)]
        return QuantizedTensor(fp8_data[start:stop], scale_inv, None, None, held.dtype)

    def joined(self, parts: list[QuantizedTensor]) -> QuantizedTensor | None:
        """Returns the rows of ``parts`` copied to one weight; None if a part ends inside a block.

        If a weight has one scale, the caller ensures that all parts have the same scale.
        """
        dtype = parts[0].dtype
        fp8_data: list[torch.Tensor] = []
        scales: list[torch.Tensor] = []
        for part in parts:
            assert part.rowwise is not None
            assert part.rowwise_scale_inv is not None
            if self.block_rows and fp8_data and fp8_data[-1].shape[0] % self.block_rows:
                return None
            fp8_data.append(part.rowwise.view(torch.uint8))
            scales.append(part.rowwise_scale_inv)
        scale_inv = torch.cat(scales) if self.block_rows else scales[0]
        return QuantizedTensor(torch.cat(fp8_data).view(dtype), scale_inv, None, None, dtype)

    def gathered(
        self, fp8_data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype
    ) -> QuantizedTensor:
        """Returns the rowwise copy of the weight that is made of all ranks' shards."""
        return QuantizedTensor(fp8_data, scale_inv, None, None, dtype)
