"""QuantizedTensor: FP8 copies of one matrix with the inverse scale that belongs to them."""

from __future__ import annotations

import torch

__all__ = ["QuantizedTensor"]


class QuantizedTensor:
    """Plain holder of an FP8 matrix; never crosses a public boundary and is no torch.Tensor.

    Attributes:
        rowwise: ``[rows, cols]`` in ``dtype``, or None.
        transposed: ``[cols, rows]`` in ``dtype``, or None.
        scale_inv: fp32 ``[1]``; value = code * scale_inv. Written with the data, never shared with
            the live scale, so a later scale update cannot change what the codes mean.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
    """

    __slots__ = ("dtype", "rowwise", "scale_inv", "transposed")

    def __init__(
        self,
        rowwise: torch.Tensor | None,
        transposed: torch.Tensor | None,
        scale_inv: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        self.rowwise = rowwise
        self.transposed = transposed
        self.scale_inv = scale_inv
        self.dtype = dtype

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values as ``[rows, cols]`` in ``dtype``."""
        if self.rowwise is not None:
            codes = self.rowwise
        elif self.transposed is not None:
            codes = self.transposed.t()
        else:
            raise ValueError("QuantizedTensor: rowwise or transposed must be present, got neither")
        return (codes.to(torch.float32) * self.scale_inv).to(dtype)

    def __repr__(self) -> str:
        rowwise = None if self.rowwise is None else tuple(self.rowwise.shape)
        transposed = None if self.transposed is None else tuple(self.transposed.shape)
        return f"QuantizedTensor(rowwise={rowwise}, transposed={transposed}, dtype={self.dtype})"
