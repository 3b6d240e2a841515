"""Reading of weights, which may be held in FP8, by GEMMs and by calibration."""

from __future__ import annotations

from typing import Any

import torch

from ..scheme.base import GemmQuantizers, GroupQuantizers
from ..tensor import QuantizedTensor
from .decode import columnwise
from .parameter import FP8Parameter

OfGemm = GemmQuantizers | GroupQuantizers


def fp8_operands(
    weight: FP8Parameter, quantizers: OfGemm, with_columnwise: bool, keep: bool = False
) -> QuantizedTensor | None:
    """Returns a weight's FP8 copies for a GEMM; None if the GEMM backend cannot read them."""
    if not reads_fp8_data(weight, quantizers, not with_columnwise):
        return None
    dtype = quantizers.weight.dtype
    if torch.compiler.is_compiling():
        rowwise = torch.ops.apex_te.fp8_parameter_rowwise(weight)
        other: Any = (None, None)
        if with_columnwise:
            other = torch.ops.apex_te.fp8_parameter_transposed(weight)
        return QuantizedTensor(rowwise[0], rowwise[1], other[0], other[1], dtype)
    held = weight._held
    if weight._rowwise_scale_inv.storage_offset() % 4:
        # A part of a stack: cuBLASLt cannot read its scale in the stack's memory.
        held = QuantizedTensor(held.rowwise, weight._rowwise_scale_inv.clone(), None, None, dtype)
    if not with_columnwise or held.columnwise is not None:
        return held
    if not keep:
        copy = columnwise(weight._recipe, held)
        return QuantizedTensor(held.rowwise, held.rowwise_scale_inv, *copy, held.dtype)
    # A later training step may need what an evaluation in inference mode keeps.
    with torch.inference_mode(False), torch.no_grad():
        held.columnwise, held.columnwise_scale_inv = columnwise(weight._recipe, held)
    return held


def is_gathered_in_fp8(weight: FP8Parameter) -> bool:
    """Returns True for a whole weight that FSDP2 gathered by ``enable_fp8_all_gather``."""
    return weight._gathered is not None and weight._gathered.settings is not None


def reads_fp8_data(weight: FP8Parameter, quantizers: OfGemm, forward: bool) -> bool:
    """Returns True if the GEMM backend can read a weight's FP8 data, in forward or backward."""
    if weight._gathered is not None:
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                "FP8Parameter: a weight that FSDP2 gathers in FP8 must be read outside of a graph "
                "of torch.compile"
            )
        weight._gathered.read_by(quantizers, forward)
    if weight._read_by is not type(quantizers.backend):
        return False
    return weight._fp8_dtype is quantizers.weight.dtype and weight._is_whole


def dequantized(weight: torch.Tensor) -> torch.Tensor:
    """Returns the values of an FP8Parameter; any other weight is returned as it is."""
    return weight.dequantize() if type(weight) is FP8Parameter else weight


def record_weight(weight: torch.Tensor, quantizer: Any) -> None:
    """Records the amax of ``weight`` in ``quantizer``, without a cast, for calibration."""
    gathered = weight._gathered if type(weight) is FP8Parameter else None
    if gathered is None or gathered.settings is None:
        quantizer.record(dequantized(weight).contiguous())
    elif gathered.amax is not None:
        quantizer.stage(gathered.amax, gathered.group)
