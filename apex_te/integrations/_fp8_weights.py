"""Replacement of converted layers' weights by Parameters that hold them in FP8."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..fp8.model_init import Settings
from ..fp8.parameter.parameter import FP8Parameter
from ..fp8.scheme.base import layout_of, scheme_of
from ..module._core.fp8_module import FP8Module
from . import _matching as matching
from ._joined_state import BLOCK, KEYS
from .conv1d import Conv1DLinear
from .experts import StackedExperts


def hold_in_fp8(
    model: nn.Module, names: Iterable[str], settings: Settings
) -> list[tuple[str, str]]:
    """Replaces weights of converted layers by Parameters that hold them in FP8 only."""
    layers = {name: model.get_submodule(name) for name in names}
    wanted = {id(layer) for layer in layers.values()}
    outside: dict[int, str] = {}  # names of other modules that have a Parameter
    for name, module in model.named_modules():
        if id(module) not in wanted:
            for parameter in module._parameters.values():
                outside.setdefault(id(parameter), name)
    made: dict[int, nn.Parameter] = {}
    left = []
    for name, layer in layers.items():
        if isinstance(layer, (Conv1DLinear, StackedExperts)):
            what = "transposed" if isinstance(layer, Conv1DLinear) else "stacked"
            left.append((name, f"fp8_model_init: its weights are {what}, and stay as they are"))
        elif isinstance(layer, FP8Module):
            reason = _hold(layer, outside, made, settings)
            if reason is not None:
                left.append((name, f"fp8_model_init: {reason}"))
    return left


def _hold(
    layer: FP8Module, outside: dict[int, str], made: dict[int, nn.Parameter], settings: Settings
) -> str | None:
    """Replaces the weights of one layer; returns the reason why one stays, or None."""
    reason = None
    # Without powers of two, what was one weight is saved with scales of its own.
    saves_scales = not scheme_of(settings.recipe).restores(settings.recipe)
    cuts_blocks = saves_scales and layout_of(settings.recipe).block_rows > 1
    for name, weight in list(layer._parameters.items()):
        if weight is None or weight.dim() != 2 or type(weight) is FP8Parameter:
            continue
        if id(weight) in outside:
            reason = f"its {name} is shared with {outside[id(weight)]}, and stays as it is"
            continue
        if cuts_blocks and _cuts_blocks(layer, name):
            reason = f"its {name} is joined of parts that cut blocks of {BLOCK} rows"
            continue
        if id(weight) not in made:
            made[id(weight)] = _held(weight, settings)
        layer._parameters[name] = made[id(weight)]
    return reason


def _cuts_blocks(layer: nn.Module, name: str) -> bool:
    """Returns True if a parameter is joined of several whose rows share blocks."""
    _, entries = vars(layer).get(KEYS, ("", ()))
    return any(e.key.rpartition(".")[2] == name and e.cuts_blocks for e in entries)


def _held(weight: nn.Parameter, settings: Settings) -> nn.Parameter:
    """Returns a Parameter with the values of ``weight``, held in FP8."""
    preserve = settings.preserve_high_precision_init_val
    shape = (weight.shape[0], weight.shape[1])
    held: Any = nn.Parameter(
        FP8Parameter.empty(shape, settings.recipe, weight.dtype, weight.device, preserve),
        requires_grad=weight.requires_grad,
    )
    vars(held).update(vars(weight))
    with torch.no_grad():
        held.initialize(lambda value: value.copy_(weight))
    parameter: nn.Parameter = held
    return parameter


class MemoryFootprint:
    """Replacement of a model's ``get_memory_footprint`` that counts the memory of FP8 weights."""

    def __init__(self, model: Any) -> None:
        # A copy or pickle of the model contains one of these that counts the copy.
        self.model = model

    def __call__(self, return_buffers: bool = True) -> int:
        nominal: int = type(self.model).get_memory_footprint(self.model, return_buffers)
        weights = [p for p in self.model.parameters() if isinstance(p, FP8Parameter)]
        return nominal - sum(p.nelement() * p.element_size() - _bytes(p) for p in weights)


def _bytes(weight: FP8Parameter) -> int:
    """Returns the bytes of the FP8 data of ``weight`` and of their scales."""
    held = weight._held
    parts = (held.rowwise, held.rowwise_scale_inv, held.columnwise, held.columnwise_scale_inv)
    own = {id(part): part.nelement() * part.element_size() for part in parts if part is not None}
    return sum(own.values())


def count_fp8_weights(model: nn.Module) -> None:
    """Replaces ``get_memory_footprint`` on Hugging Face's models in ``model``, on the instances."""
    for module in matching.pretrained_models(model):
        vars(module)["get_memory_footprint"] = MemoryFootprint(module)
