"""QuantizedTensor: low-precision copies of one matrix with the scales that belong to them."""

from __future__ import annotations

import torch

__all__ = ["QuantizedTensor"]


class QuantizedTensor:
    """Low-precision copies of one matrix, which never cross a public boundary.

    Attributes:
        rowwise: FP8 data ``[rows, cols]`` in ``dtype``, or None.
        rowwise_scale_inv: multipliers of ``rowwise`` to high precision, in the scheme's shape:
            ``value = data * scale_inv``. Written with the data, never shared with the live scale,
            so that a later scale update cannot change what the data mean.
        columnwise: FP8 data ``[cols, rows]`` in ``dtype``, or None.
        columnwise_scale_inv: multipliers of ``columnwise``; the tensor of ``rowwise`` where one
            scale serves both.
        dtype: ``torch.float8_e4m3fn``, ``torch.float8_e5m2`` or ``torch.uint8`` (HiF8).
    """

    __slots__ = ("columnwise", "columnwise_scale_inv", "dtype", "rowwise", "rowwise_scale_inv")

    def __init__(
        self,
        rowwise: torch.Tensor | None,
        rowwise_scale_inv: torch.Tensor | None,
        columnwise: torch.Tensor | None,
        columnwise_scale_inv: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self.rowwise = rowwise
        self.rowwise_scale_inv = rowwise_scale_inv
        self.columnwise = columnwise
        self.columnwise_scale_inv = columnwise_scale_inv
        self.dtype = dtype

    def __repr__(self) -> str:
        rowwise = None if self.rowwise is None else tuple(self.rowwise.shape)
        columnwise = None if self.columnwise is None else tuple(self.columnwise.shape)
        return f"QuantizedTensor(rowwise={rowwise}, columnwise={columnwise}, dtype={self.dtype})"
