"""Gradients of queries, keys and values, which one op joins and casts to FP8."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ...ops.fp8_output import FP8Output
from ...ops.qkv_cast import qkv_cast_grad
from .fused_casts import BaseFusedCast
from .head_layout import HeadLayout


def output_gradient(shape: Any, grad: Any, *others: Any) -> Any:
    """Returns ``grad``; if it is None, zeros of ``shape`` like the first tensor of ``others``."""
    if grad is not None:
        return grad
    return next(other for other in others if other is not None).new_zeros(shape)


def filled_gradients(shapes: Sequence[Any], grads: Sequence[Any], *others: Any) -> list[Any]:
    """Returns the gradients of several outputs, with zeros for each gradient that is None."""
    return [
        output_gradient(shape, grad, *others) for grad, shape in zip(grads, shapes, strict=True)
    ]


class HeadGradients(BaseFusedCast):
    """Fused cast that joins gradients of heads into the gradient of a projection's output."""

    copies = True
    __slots__ = ("heads", "layout")

    def __init__(self, layout: HeadLayout, heads: Sequence[torch.Tensor]) -> None:
        super().__init__(heads[-1])
        self.layout = layout
        self.heads = tuple(heads)

    def plain(self) -> torch.Tensor:
        """Returns the gradient ``[tokens, features]`` in bf16 or fp32."""
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
        """Returns the gradient ``[tokens, features]`` in FP8; arguments as of ``FusedCast.fp8``."""
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
