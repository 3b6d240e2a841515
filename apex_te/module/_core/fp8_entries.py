"""Entries of state dicts for parameters that do not save their values as torch does.

FP8 weights are saved as values in their nominal dtype. Those with free scales, which values do not
restore, are saved as files of released models have them: ``weight``, the FP8 data, and
``weight_scale_inv``, one scale or one for each block of 128x128. Modules with plain weights load
these, too.
"""

from __future__ import annotations

from typing import Any

import torch

from ...fp8.parameter.parameter import FP8Parameter
from ...fp8.scheme.base import layout_of
from ...recipe import BlockScaling, CurrentScaling, Recipe, RowwiseScaling

SCALE = "_scale_inv"


class _ScaleOf:
    """Attribute for the key of a weight's scales: torch's ``get_state_dict`` looks keys up so."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, kind: Any = None) -> Any:
        if module is None:  # of the class
            return self
        found = _entries_of(module._parameters.get(self.name))
        if found is None or found[1] is None:
            raise AttributeError(f"{kind.__name__}: {self.name} does not have its own scales")
        return found[1]


def save_parameters(module: torch.nn.Module, destination: dict[str, Any], prefix: str) -> None:
    """Replaces entries of a state dict, in place, for parameters that torch would save as objects.

    ``destination`` has the entries that torch made of the parameters.
    """
    for name, value in module._parameters.items():
        entries = None if value is None else _entries_of(value)
        if entries is None:
            continue
        destination[prefix + name], scale_inv = entries
        if scale_inv is not None:
            destination[prefix + name + SCALE] = scale_inv
            if not hasattr(module, name + SCALE):
                setattr(type(module), name + SCALE, _ScaleOf(name))


def joined_scales(
    module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, errors: list[str]
) -> dict[str, Any]:
    """Returns a state dict in which pairs of FP8 data and scales of the module are one entry each.

    That is an FP8Parameter for a weight held in FP8, for others the values.
    """
    found: dict[str, Any] = {}
    for name, own in module._parameters.items():
        key = prefix + name
        codes, scale_inv = state_dict.get(key), state_dict.get(key + SCALE)
        if own is None or not isinstance(codes, torch.Tensor) or type(codes) is FP8Parameter:
            continue
        if isinstance(scale_inv, torch.Tensor):
            try:
                found[key] = given_weight(own, codes, scale_inv)
            except (TypeError, ValueError) as error:
                errors.append(f"{key}: {error}")
        elif codes.dtype.itemsize == 1 and codes.is_floating_point():
            errors.append(f"{key} must have its scales beside it, got {codes.dtype} and none")
    if not found:
        return state_dict
    rest = {key: v for key, v in state_dict.items() if key.removesuffix(SCALE) not in found}
    return rest | found


def _local(value: Any) -> Any:
    """Returns this rank's part of a DTensor; any other tensor as it is."""
    return getattr(value, "_local_tensor", value)


def _like(of: Any, local: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Returns this rank's part as a DTensor of ``shape`` like ``of``; as it is if that is plain."""
    if _local(of) is of:
        return local
    stride = torch.empty(shape, device="meta").stride()
    made: torch.Tensor = type(of).from_local(
        local, of.device_mesh, of.placements, run_check=False, shape=shape, stride=stride
    )
    return made


def _entries_of(value: Any) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Returns entry and scales, or None, of a parameter; None if torch saves it as it should."""
    held, shape = _local(value), getattr(value, "shape", None)
    if type(held) is not FP8Parameter:
        return (_like(value, held.plain(), value.shape), None) if hasattr(held, "plain") else None
    assert shape is not None
    if not held.has_free_scales or held.is_meta:
        return _like(value, held.detach().dequantize(), shape), None
    weight: Any = held.detach()
    codes, scale_inv = weight.codes()
    *count, rows, cols = shape
    scales = layout_of(held.recipe).scales_of_file(rows, cols)
    assert scales is not None
    if count or held._layout.block_rows:
        scale_inv = _like(value, scale_inv, torch.Size((*count, *scales)))
    return _like(value, codes, shape), scale_inv


def given_weight(own: Any, codes: Any, scale_inv: Any) -> torch.Tensor:
    """Returns data and scales as an FP8Parameter, or as values if ``own`` is not held in FP8.

    Of whole data, or scales, for a DTensor ``own`` this takes the rank's own.
    """
    held, data, count = _local(own), _local(codes), codes.shape[:-2]
    if held is not own and codes.shape == own.shape:
        if data is codes:
            data = _own_rows(own, codes, 1)
        if scale_inv is _local(scale_inv) and scale_inv.dim() > 1:
            each = count or scale_inv.shape[0] == codes.shape[0]
            scale_inv = _own_rows(own, scale_inv, 1 if each else 128)
    scale_inv = _local(scale_inv).to(torch.float32)
    is_held = type(held) is FP8Parameter
    recipe = _recipe_of(held.recipe if is_held else None, data, scale_inv.shape[len(count) :])
    dtype = held.dtype if held.is_floating_point() else torch.float32
    weight: Any = FP8Parameter.from_codes(data, scale_inv, recipe, dtype)
    return _like(own, weight if is_held else weight.dequantize(), codes.shape)


def _recipe_of(own: Recipe | None, data: torch.Tensor, scales: torch.Size) -> Recipe:
    """Returns a recipe whose weights have scales of this shape, ``own`` if it is one."""
    rows, cols = data.shape[-2:]
    shape = None if own is None else layout_of(own).scales_of_file(rows, cols)
    if len(scales) < 2:
        return CurrentScaling() if own is None or shape is None or len(shape) == 2 else own
    if own is not None and shape == scales:
        return own
    if scales == (rows, 1):
        return RowwiseScaling()
    # Other shapes are refused, in the terms of the weight.
    return own if own is not None and shape is not None and len(shape) == 2 else BlockScaling()


def _own_rows(own: Any, whole: torch.Tensor, step: int) -> torch.Tensor:
    """Returns this rank's part of a whole tensor with a row for ``step`` rows of ``own``."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, start = compute_local_shape_and_global_offset(own.shape, own.device_mesh, own.placements)
    return whole[start[0] // step : -(-(start[0] + size[0]) // step)]
