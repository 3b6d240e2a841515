"""QuantizedTensor: FP8 copies of one matrix with their scales, and the formats of a device."""

from __future__ import annotations

import torch

from ..recipe import Format, FormatValue
from ..runtime.device import multiplies_fnuz

_FNUZ = {
    torch.float8_e4m3fn: (torch.float8_e4m3fnuz, 240.0),
    torch.float8_e5m2: (torch.float8_e5m2fnuz, 57344.0),
}


def formats_of(fp8_format: Format, device: torch.device) -> FormatValue:
    """Returns a format's element types, fnuz if the device supports only these, and ``fp8_max``."""
    value = fp8_format.value
    if value.fwd_dtype not in _FNUZ or not multiplies_fnuz(device):
        return value
    (fwd, max_fwd), (bwd, max_bwd) = _FNUZ[value.fwd_dtype], _FNUZ[value.bwd_dtype]
    return FormatValue(max_fwd, max_bwd, fwd, bwd)


class QuantizedTensor:
    """FP8 copies of one matrix ``[rows, cols]`` with their scales; internal, not visible to users.

    ``value = data * scale_inv``. Scales are stored with the data instead of being views of a state,
    so that a later update cannot change the values.

    Attributes:
        rowwise_scale_inv: ``[1]``, or one for each block.
        columnwise: FP8 data of the transpose, ``[cols, rows]``, possibly with ``rows`` padded by
            zeros to a multiple of 16.
        columnwise_scale_inv: the tensor ``rowwise_scale_inv`` itself if both copies have one scale.
        dtype: an FP8 dtype of torch, or ``torch.uint8`` (HiF8).
        free: True if the scales are data, which casting the values does not restore.
        amax: fp32 ``[1]``, from which one scale was computed, for a second cast of the same matrix;
            None if the scale does not depend on the matrix.
        scales: fp32 ``[2]``, ``scale_inv`` and the scale, where an op wrote both copies with the
            scale of its result; else None.
    """

    __slots__ = (
        "amax",
        "columnwise",
        "columnwise_scale_inv",
        "dtype",
        "free",
        "rowwise",
        "rowwise_scale_inv",
        "scales",
    )

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
        self.free = False
        self.amax: torch.Tensor | None = None
        self.scales: torch.Tensor | None = None

    def __repr__(self) -> str:
        rowwise = None if self.rowwise is None else tuple(self.rowwise.shape)
        columnwise = None if self.columnwise is None else tuple(self.columnwise.shape)
        return f"QuantizedTensor(rowwise={rowwise}, columnwise={columnwise}, dtype={self.dtype})"
