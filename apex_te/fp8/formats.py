"""Element types of the FP8 formats on a device: OCP's, or fnuz on AMD gfx94x."""

from __future__ import annotations

import torch

from ..recipe import Format, FormatValue
from ..runtime.device import multiplies_fnuz

_FNUZ = {
    torch.float8_e4m3fn: (torch.float8_e4m3fnuz, 240.0),
    torch.float8_e5m2: (torch.float8_e5m2fnuz, 57344.0),
}


def formats_of(fp8_format: Format, device: torch.device) -> FormatValue:
    """Returns a format's element types, fnuz if the device supports only these, and ``fp8_max``.

    Source: AMD CDNA3 instruction set (fnuz), OCP OFP8 1.0.
    """
    value = fp8_format.value
    if value.fwd_dtype not in _FNUZ or not multiplies_fnuz(device):
        return value
    (fwd, max_fwd), (bwd, max_bwd) = _FNUZ[value.fwd_dtype], _FNUZ[value.bwd_dtype]
    return FormatValue(max_fwd, max_bwd, fwd, bwd)
