"""Form of a stack of weights that is stored in FP8 only, such as those of experts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..tensor import QuantizedTensor
from .base import Layout, Quantizer, layout_of

if TYPE_CHECKING:
    from ...recipe import Recipe


class Stack(Layout):
    """Form of weights ``[count, rows, cols]``, each stored as the layout ``of`` stores one weight.

    Scales are ``[count, ...]``. The rows of ``Layout`` are the weights here: none shares a scale.
    """

    block_rows = 1

    def __init__(self, of: Layout) -> None:
        self.of = of
        self.name = f"stack of weights with {of.name}"

    def quantize(self, quantizer: Any, x: torch.Tensor) -> QuantizedTensor:
        made = self.of.quantize_stack(quantizer, x)
        return stacked([self.of.quantize(quantizer, each) for each in x]) if made is None else made

    def columnwise(
        self, quantizer: Any, held: QuantizedTensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.of.columnwise_stack(held)
        if made is not None:
            return made
        parts = [self.of.columnwise(quantizer, part) for part in self.parts(held)]
        return _joined([part[0] for part in parts]), _joined([part[1] for part in parts])

    def dequantize(self, quantizer: Any, held: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
        scale_inv: Any = held.rowwise_scale_inv
        if type(quantizer)._decode is Quantizer._decode and scale_inv.dim() == 2:
            return quantizer._decode(held.rowwise, scale_inv[:, :, None], dtype)
        return torch.stack([quantizer.dequantize(part, dtype) for part in self.parts(held)])

    def parts(self, held: QuantizedTensor) -> list[QuantizedTensor]:
        """Returns views of each weight's rowwise copy."""
        data, scales = held.rowwise, held.rowwise_scale_inv
        assert data is not None
        assert scales is not None
        return [
            QuantizedTensor(*pair, None, None, held.dtype)
            for pair in zip(data.unbind(0), scales.unbind(0), strict=True)
        ]


def stacked(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Returns the rowwise copies of weights of one shape, copied to a stack."""
    data = _joined([part.rowwise for part in parts])
    scales = _joined([part.rowwise_scale_inv for part in parts])
    return QuantizedTensor(data, scales, None, None, parts[0].dtype)


def _joined(parts: Sequence[Any]) -> torch.Tensor:
    """Returns ``torch.stack`` of tensors of any dtype, also of those that it does not take."""
    dtype: torch.dtype = parts[0].dtype
    if dtype.itemsize > 1:
        return torch.stack(list(parts))
    return torch.stack([part.view(torch.uint8) for part in parts]).view(dtype)


@functools.cache
def _stack_of(layout: Layout) -> Stack:
    return Stack(layout)


def stored_layout(recipe: Recipe, dims: int) -> Layout:
    """Returns the form in which a weight of 2 dimensions, or a stack of 3, is stored."""
    layout = layout_of(recipe)
    return layout if dims == 2 else _stack_of(layout)


def stored_scale_inv(
    recipe: Recipe, shape: Sequence[int], device: torch.device, columnwise: bool = False
) -> torch.Tensor:
    """Returns an uninitialized ``scale_inv`` for a copy of a weight or a stack in ``shape``."""
    *count, rows, cols = shape
    layout = layout_of(recipe)
    make = layout.columnwise_scale_inv if columnwise else layout.scale_inv
    one = make(rows, cols, device)
    return one.new_empty((*count, *one.shape)) if count else one
