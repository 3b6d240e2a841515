"""What all ranks with the same modules call an FP8 state: its class, and its layer or stage."""

from __future__ import annotations

from typing import Any

import torch

from ...comm.groups import pipeline_stage
from .registry import registry

__all__ = ["label_of", "number_layer"]


def label_of(owner: Any) -> str:
    """The label of a state whose module is not numbered."""
    return "" if owner is None else _label(owner, "stage", pipeline_stage())


def number_layer(layer: torch.nn.Module, number: int | None, kind: str = "layer") -> None:
    """Note in the FP8 states of ``layer`` which layer, or stage, it is of, if that is known."""
    if number is None:
        return
    for module in layer.modules():
        state = getattr(module, "_fp8", None)
        if state is not None:
            state.label = _label(module, kind, number)
            registry.relabel(state)


def _label(module: Any, kind: str, number: int | None) -> str:
    name = type(module).__name__
    return name if number is None else f"{name} of {kind} {number}"
