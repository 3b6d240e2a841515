"""QuantizedTensor: FP8 copies of one matrix with their scales."""

from __future__ import annotations

import torch


class QuantizedTensor:
    """FP8 copies of one matrix ``[rows, cols]`` with their scales; internal, never given to users.

    Attributes:
        rowwise: FP8 data ``[rows, cols]`` in ``dtype``, or None.
        rowwise_scale_inv: multipliers of ``rowwise`` to high precision, ``value = data *
            scale_inv``, in the scheme's shape: ``[1]``, or one for each block. They are written
            together with the data, not views of a state, so that a later scale update cannot change
            the values.
        columnwise: FP8 data ``[cols, rows]`` in ``dtype``, or None. ``rows``, over which a weight
            gradient contracts, may be padded with zeros to a multiple of 16.
        columnwise_scale_inv: multipliers of ``columnwise``; the same tensor as
            ``rowwise_scale_inv`` if one scale serves both.
        dtype: an FP8 dtype of torch, e.g. ``torch.float8_e4m3fn``, or ``torch.uint8`` (HiF8).
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
