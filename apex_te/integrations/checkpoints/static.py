"""Scales of inputs in a checkpoint, with which delayed scaling begins and which files get again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ...fp8.delayed.state import FORWARD_SLOTS, FP8State
from ...fp8.module_fp8 import init_fp8_state
from ...recipe import DelayedScaling
from ..fusion import key_map

_E4M3_MAX = 448.0


class _Place(NamedTuple):
    """Slots of inputs in a module's FP8 state, and the scale ``[slots]`` that they begin with."""

    state: FP8State
    slots: slice
    scale_inv: torch.Tensor
    names: list[str]


def set_input_scales(
    model: nn.Module, scales: Mapping[str, torch.Tensor], recipe: DelayedScaling
) -> None:
    """Gives the FP8 state of ``model`` the scales of inputs, by names of weights, as its own.

    Their amax is in the history, from which it goes in training. Weights that are joined get the
    largest of their scales.
    """
    init_fp8_state(model, recipe)
    with torch.no_grad():
        for state, slots, scale_inv, _ in _places(model, scales):
            state.scale_inv_fwd[slots] = scale_inv
            state.scale_fwd[slots] = 1 / scale_inv
            state.pending_scale_fwd[slots] = 1 / scale_inv
            state.amax_history_fwd[-1:, slots] = scale_inv * (_E4M3_MAX / 2**recipe.margin)
            due = state.first_steps.still_due()
            due[slots] = [False] * len(due[slots])
            state.first_steps.set(due)


def input_scales_now(
    model: nn.Module, scales: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns the scales that were read, or those of the FP8 state where it has others by now."""
    found = dict(scales)
    for state, slots, scale_inv, names in _places(model, scales):
        if not state.allocated:
            continue
        now = state.scale_inv_fwd[slots]
        if not torch.equal(now, scale_inv.to(now.device)):
            for name in names:
                shape = (-1, *[1] * (scales[name].dim() - 1)) if scales[name].dim() else ()
                found[name] = now.reshape(shape).expand_as(scales[name]).contiguous()
    return found


def _places(model: nn.Module, scales: Mapping[str, torch.Tensor]) -> list[_Place]:
    """Returns the slots to which the scales of inputs belong, those of joined weights once."""
    joined = {
        key: (model.get_submodule(owner), int(attribute.startswith("fc2")))
        for entry in key_map(model).entries
        for owner, _, attribute in [entry.key.rpartition(".")]
        for key, _ in entry.parts
    }
    found: dict[tuple[int, int], _Place] = {}
    for name, value in scales.items():
        path, _, own = name.rpartition(".")
        module: Any
        gemm = 0
        if name in joined:
            module, gemm = joined[name]
        else:
            module = model.get_submodule(path)
            gemms = {"gate_up_proj": "gate_up_gemm", "down_proj": "down_gemm"}
            module = getattr(module, gemms.get(own, ""), module)
        state = getattr(module, "fp8_state", None)
        if state is None:
            continue  # a layer that is not converted
        count = 1 if name in joined else state.gemms
        scale_inv = value.reshape(count, -1).amax(1)
        key = id(state), gemm
        if key in found:
            before = found[key]
            scale_inv = torch.maximum(before.scale_inv, scale_inv)
            found[key] = before._replace(scale_inv=scale_inv, names=[*before.names, name])
        else:
            start = FORWARD_SLOTS * gemm
            slots = slice(start, start + FORWARD_SLOTS * count, FORWARD_SLOTS)
            found[key] = _Place(state, slots, scale_inv, [name])
    return list(found.values())
