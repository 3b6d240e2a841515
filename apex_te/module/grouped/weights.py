"""FP8 copies of all groups' weights, read from FP8 Parameters, cached or cast."""

from __future__ import annotations

from typing import Any

import torch

from ...fp8.parameter.decode import columnwise
from ...fp8.parameter.operands import dequantized, fp8_operands, reads_fp8_data
from ...fp8.parameter.parameter import FP8Parameter
from ...fp8.scheme.base import GemmQuantizers, GroupQuantizers
from ...fp8.scheme.stack import stacked
from ...fp8.tensor import QuantizedTensor
from ...ops.grouped_quantize import GroupedOutput
from ...runtime.stamp import stamp
from ...runtime.tracing import is_transformed
from .._core.fp8_module import Modes

CACHE = -1  # in place of the number of a GEMM: the weights of all groups as one
Tensors = tuple[torch.Tensor, ...]


def matrices_of(weights: Any) -> Any:
    """Returns the weights as casts take them: those of each group, or the stacks of all."""
    values = [dequantized(weight) for weight in weights]
    return values[0] if len(values) == 1 and values[0].dim() == 3 else values


def stack_of(parts: Any, dtype: torch.dtype, dim: int) -> torch.Tensor:
    """Returns parameters of all groups as one tensor ``[groups, ...]``; each has ``dim`` dims."""
    values = [dequantized(part).to(dtype) for part in parts]
    return values[0] if values[0].dim() > dim else torch.stack(values)


def held_copies(
    weights: Any, quantizers: GroupQuantizers, with_columnwise: bool, keep: bool = False
) -> GroupedOutput | None:
    """Returns the FP8 data of weights that are held in FP8; None if the GEMMs cannot read them.

    A stack is not copied. ``keep`` keeps its columnwise copy until the next write.
    """
    if not _are_held(weights, quantizers, not with_columnwise):
        return None
    held: Any
    if weights[0].dim() == 3:
        held = fp8_operands(weights[0], quantizers, with_columnwise, keep)
    else:
        held = stacked([weight._held for weight in weights])
        if with_columnwise:
            copy = columnwise(weights[0].recipe, held)
            held = QuantizedTensor(held.rowwise, held.rowwise_scale_inv, *copy, held.dtype)
    rowwise, columns = held.rowwise_scale_inv, held.columnwise_scale_inv
    if rowwise.dim() == 2:  # one scale for each weight
        return GroupedOutput(held.rowwise, held.columnwise, rowwise.flatten(), None)
    of_columns: Any = columns if with_columnwise else None
    return GroupedOutput(held.rowwise, held.columnwise, of_columns, rowwise)


def held_parts(
    weight: FP8Parameter, quantizers: GemmQuantizers
) -> tuple[QuantizedTensor, ...] | None:
    """Returns both FP8 copies of each weight of a stack; None if the GEMMs cannot read them.

    They are copies: graphs with an FP8 Parameter return no views, and cuBLASLt needs scales at
    addresses that those of a stack do not have.
    """
    held: Any = fp8_operands(weight, quantizers, True)
    if held is None:
        return None
    rowwise, row_scales = held.rowwise, held.rowwise_scale_inv
    columns, column_scales = held.columnwise, held.columnwise_scale_inv
    return tuple(
        QuantizedTensor(
            rowwise[i].clone(), row_scales[i].clone(), columns[i].clone(),
            column_scales[i].clone(), held.dtype,
        )
        for i in range(weight.shape[0])
    )  # fmt: skip


def _are_held(weights: Any, quantizers: GroupQuantizers, forward: bool = True) -> bool:
    """Returns True if all weights are held in FP8 data that the GEMMs of ``quantizers`` read."""
    if len(weights) > 1 and weights[0].dim() == 3:
        return False  # they would have to be joined
    return all(
        type(weight) is FP8Parameter and reads_fp8_data(weight, quantizers, forward)
        for weight in weights
    )


def cached_weights(
    modes: Modes, weights: Tensors, quantizers: GroupQuantizers, fill: bool | None
) -> GroupedOutput | None:
    """Returns both FP8 copies of all weights, from the module's cache if they are up to date.

    ``fill=True`` casts all weights, ``False`` does so only if one has changed. With None, in
    compiled code and under torch.func transforms, returns None, and the caller casts the weights.
    """
    # Compiled code comes here with schemes without state, whose casts of a weight are all equal.
    if torch.compiler.is_compiling():
        return None
    if modes.captured is None and (fill is None or is_transformed(weights)):
        return None
    if _are_held(weights, quantizers):
        if modes.captured is not None:
            return None  # each replay reads the data
        if weights[0].dim() == 3:
            return held_copies(weights, quantizers, True, keep=True)
    if modes.captured is not None:
        matrices = matrices_of(weights)
        return modes.captured.quantized_matrices(weights, matrices, quantizers.weight)
    stamps = tuple([stamp(w) for w in weights])
    key = stamps, type(quantizers.weight_recast), quantizers.weight_recast.dtype

    def cast() -> GroupedOutput:
        with torch.inference_mode(False), torch.no_grad():
            held = held_copies(weights, quantizers, True)
            if held is not None:
                return held
            return quantizers.weight.quantize_matrices(matrices_of(weights), None, True, True)

    copies: GroupedOutput = modes.weight_cache.copies(CACHE, key, fill, cast)
    return copies
