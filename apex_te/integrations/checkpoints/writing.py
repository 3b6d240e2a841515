"""A model's FP8 weights in the layout of the checkpoint that they were read from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...fp8.parameter.parameter import FP8Parameter
from ..fusion import key_map
from .description import Form
from .holding import unpadded
from .mapping import Held


def file_state(
    model: nn.Module, weights: Mapping[str, Held], input_scales: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Returns a model's state dict in which codes and scales replace the FP8 weights.

    Scales have the names in the checkpoint, beside the weights, and the dtype there, unless that
    cannot hold the scale of a weight that was trained; then they are float32.
    """
    parameters = _fp8_weights(model)
    # State dicts have their scales, too, under names of their own.
    in_fp8 = parameters.keys() | {e.key for e in key_map(model).entries}
    found: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        held, weight = weights.get(name), parameters.get(name)
        if held is None or weight is None:
            if not name.endswith("_scale_inv") or name.removesuffix("_scale_inv") not in in_fp8:
                found[name] = value
            continue
        prefix = name.rpartition(".")[0]
        found[name], found[f"{prefix}.{held.scale}"] = _stored(weight, held)
        if held.input_scale is not None:
            found[f"{prefix}.{held.input_scale}"] = input_scales[name]
    return found


def _fp8_weights(model: nn.Module) -> dict[str, FP8Parameter]:
    """Returns the FP8 weights by name, those that are joined by the names before that."""
    found: dict[str, Any] = {
        name: parameter.detach()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if type(parameter) is FP8Parameter
    }
    for entry in key_map(model).entries:
        whole = found.pop(entry.key, None)
        if whole is None:
            continue
        start = 0
        for key, rows in entry.parts:
            found[key] = whole[start : start + rows]
            start += rows
    return found


def _stored(weight: FP8Parameter, held: Held) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes and scales in the shapes to which the checkpoint's are loaded."""
    codes, scale = weight.codes()
    stored, shape = held.stored, held.shape
    if stored.form is Form.TENSOR:  # one for all parts of a matrix
        scale = scale.reshape(*shape[:-2], 1, 1).expand(*shape[:-2], held.parts, 1).contiguous()
    scale = _narrowed(scale, stored.scale_header.dtype)
    if held.pattern is None:
        scale = scale.reshape(stored.scale_header.shape)
    return unpadded(codes, shape, held.parts), scale


def _narrowed(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns float32 scales in ``dtype`` if it holds them exactly."""
    is_bytes = dtype is torch.uint8
    narrow = scale.to(torch.float8_e8m0fnu if is_bytes else dtype)
    if not torch.equal(narrow.float(), scale):
        return scale
    return narrow.view(torch.uint8) if is_bytes else narrow
