"""Gradients of a fused projection's heads, which one op joins and casts to FP8."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ...ops.fp8_output import FP8Output
from ...ops.qkv_cast import qkv_cast_grad
from .fused_casts import BaseFusedCast
from .head_layout import HeadLayout

__all__ = ["HeadGradients", "filled_gradients", "output_gradient"]


def output_gradient(shape: Any, grad: Any, *others: Any) -> Any:
    """Returns the gradient of one output, which is zeros if only other outputs were used.

    Args:
        shape: the output's shape.
        grad: its gradient, or None.
        others: gradients of all outputs, at least one not None.
    """
    if grad is not None:
        return grad
    return next(other for other in others if other is not None).new_zeros(shape)


def filled_gradients(shapes: Sequence[Any], grads: Sequence[Any], *others: Any) -> list[Any]:
    """Returns the gradients of several outputs, zeros for those that were not used.

    Args:
        shapes: the outputs' shapes.
        grads: their gradients, or None.
        others: as in ``output_gradient``.
    """
    return [
        output_gradient(shape, grad, *others) for grad, shape in zip(grads, shapes, strict=True)
    ]


class HeadGradients(BaseFusedCast):
    """Gradient of a projection's output, as a fused cast that reads those of its heads.

    Args:
        layout: the layout of the heads in the output, whose features have the weight's order.
        heads: gradients of the queries, keys and values, as ``HeadLayout.heads`` returns these.
    """

    __slots__ = ("heads", "layout")

    def __init__(self, layout: HeadLayout, heads: Sequence[torch.Tensor]) -> None:
        super().__init__(heads[-1])
        self.layout = layout
        self.heads = tuple(heads)

    def plain(self) -> torch.Tensor:
        """Returns the gradient ``[tokens, features]`` in high precision."""
        x = self.x
        features = sum(head.shape[-2] for head in self.heads) * x.shape[-1]
        return self.layout.joined(self.heads, (math.prod(x.shape[:-2]), features))

    def fp8(
        self,
        scale: torch.Tensor,
        dtype: torch.dtype,
        rowwise: bool,
        columnwise: bool,
        amax: torch.Tensor | None,
        pad_columnwise: bool = False,
    ) -> FP8Output:
        """Returns the FP8 copies of the gradient; see ``FusedCast.fp8``."""
        queries = self.heads[0] if self.layout.repeats else None
        keys, values = self.heads[-2:]
        out = qkv_cast_grad(
            queries, keys, values, scale, dtype, interleaved=self.layout.interleaved,
            rowwise=rowwise, columnwise=columnwise, amax=amax, pad_columnwise=pad_columnwise,
            # A run for the amax alone leaves the sums to the one that writes FP8 data.
            with_dbias=self.with_dbias and (rowwise or columnwise),
        )  # fmt: skip
        if out.dbias is not None:
            self.dbias = out.dbias
        return out.output
