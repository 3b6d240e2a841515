"""Values and columnwise copy of an FP8Parameter, made from its rowwise data, also in a trace."""

from __future__ import annotations

import functools
import json

import torch

from ...recipe import Recipe, pack_recipe, unpack_recipe
from ..scheme import GemmQuantizers, build_quantizers
from ..scheme.stack import stored_layout, stored_scale_inv
from ..tensor import QuantizedTensor

# Ops that take fake tensors, too: torch traces an FP8Parameter's ops where
# torch.compiler.is_compiling() is False.
_library = torch.library.Library("apex_te", "FRAGMENT")
_library.define(
    "fp8_codes_values(Tensor codes, Tensor scale_inv, str recipe, ScalarType dtype) -> Tensor"
)
_library.define(
    "fp8_codes_transposed(Tensor codes, Tensor scale_inv, str recipe) -> (Tensor, Tensor)"
)


@functools.cache
def quantizers_of(recipe: Recipe, device: torch.device) -> GemmQuantizers:
    """Returns the quantizers of one GEMM for a recipe that keeps no state, cached."""
    return build_quantizers(recipe, None, 1, device).frozen[0]


def values(recipe: Recipe, held: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a stored weight or stack as ``dtype``, decoded from its rowwise copy."""
    fp8_data = held.rowwise
    assert fp8_data is not None
    if fp8_data.device.type == "meta":
        return torch.empty(fp8_data.shape, dtype=dtype, device=fp8_data.device)
    if type(fp8_data) is torch.Tensor:
        layout = stored_layout(recipe, fp8_data.dim())
        return layout.dequantize(quantizers_of(recipe, fp8_data.device).weight, held, dtype)
    op = torch.ops.apex_te.fp8_codes_values
    return op(fp8_data, held.rowwise_scale_inv, _packed(recipe), dtype)


def columnwise(recipe: Recipe, held: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the columnwise data ``[.., cols, rows]`` and ``scale_inv`` of a stored weight."""
    fp8_data = held.rowwise
    assert fp8_data is not None
    if type(fp8_data) is torch.Tensor:
        layout = stored_layout(recipe, fp8_data.dim())
        return layout.columnwise(quantizers_of(recipe, fp8_data.device).weight, held)
    op = torch.ops.apex_te.fp8_codes_transposed
    return op(fp8_data, held.rowwise_scale_inv, _packed(recipe))


@functools.cache
def _packed(recipe: Recipe) -> str:
    """Returns a recipe as JSON text, an argument that ops can have."""
    return json.dumps(pack_recipe(recipe))


@functools.cache
def _unpacked(text: str) -> Recipe:
    """Returns the recipe that ``_packed`` made into JSON text."""
    return unpack_recipe(json.loads(text))


def _held(fp8_data: torch.Tensor, scale_inv: torch.Tensor) -> QuantizedTensor:
    """Returns rowwise data and their scales as a QuantizedTensor."""
    return QuantizedTensor(fp8_data, scale_inv, None, None, fp8_data.dtype)


def _values_op(
    fp8_data: torch.Tensor, scale_inv: torch.Tensor, recipe: str, dtype: torch.dtype
) -> torch.Tensor:
    """Runs ``values`` as the op ``fp8_codes_values``."""
    return values(_unpacked(recipe), _held(fp8_data, scale_inv), dtype)


def _values_fake(
    fp8_data: torch.Tensor, scale_inv: torch.Tensor, recipe: str, dtype: torch.dtype
) -> torch.Tensor:
    """Returns the result of ``fp8_codes_values`` for fake tensors."""
    return torch.empty_like(fp8_data, dtype=dtype)


def _transposed_op(
    fp8_data: torch.Tensor, scale_inv: torch.Tensor, recipe: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs ``columnwise`` as the op ``fp8_codes_transposed``."""
    # Scales that serve both copies may not be an op's input and output.
    copy, scale = columnwise(_unpacked(recipe), _held(fp8_data, scale_inv))
    return copy, scale.clone() if scale.data_ptr() == scale_inv.data_ptr() else scale


def _transposed_fake(
    fp8_data: torch.Tensor, scale_inv: torch.Tensor, recipe: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the results of ``fp8_codes_transposed`` for fake tensors."""
    *count, rows, cols = fp8_data.shape
    scale = stored_scale_inv(_unpacked(recipe), fp8_data.shape, fp8_data.device, True)
    return fp8_data.new_empty((*count, cols, rows)), scale


for _name, _run, _fake in (
    ("fp8_codes_values", _values_op, _values_fake),
    ("fp8_codes_transposed", _transposed_op, _transposed_fake),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _run, _key)
    torch.library.register_fake(f"apex_te::{_name}", _fake, lib=_library)
