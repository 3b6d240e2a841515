"""Initialisation of joined layers by the ``_init_weights`` of Hugging Face's models."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from . import _matching as matching
from ._joined_state import PartView

ORIGINAL = "_apex_te_original"


class Original(NamedTuple):
    """Layer that a joined layer replaces; ``views`` has its parameters, by dotted name in it."""

    module: nn.Module
    views: dict[str, PartView]


class InitWeights:
    """Callable that replaces a model's ``_init_weights`` and also initialises joined layers.

    Each original layer is initialised like the model's class does it, on views of the joined
    parameters.
    """

    def __init__(self, model: Any) -> None:
        # A copy or pickle of the model contains one of these that initialises the copy.
        self.model = model

    def __call__(self, module: nn.Module) -> None:
        init = type(self.model)._init_weights
        own = vars(module)
        if ORIGINAL not in own:
            init(self.model, module)
        elif own[ORIGINAL] is not None:
            original: Original = own[ORIGINAL]
            layers = [(original.module.get_submodule(n), v) for n, v in original.views.items()]
            parts = [(layer, name, view) for layer, view in layers for name in view.rows]
            try:
                for layer, name, view in parts:
                    layer._parameters[name] = _parameter(view, name)
                original.module.apply(lambda layer: init(self.model, layer))
                with torch.no_grad():
                    for layer, name, view in parts:
                        found, value = view.part(name), layer._parameters[name]
                        if view.rows[name][3] and found is not None and value is not None:
                            found.copy_(value)
            finally:
                for layer, name, _ in parts:
                    layer._parameters[name] = None


def _parameter(view: PartView, attribute: str) -> nn.Parameter:
    """Returns a Parameter that shares its memory with a part of a joined one.

    If the part's memory is laid out otherwise than the original parameter's, it is a copy: random
    values are drawn in the order of memory.
    """
    whole = getattr(view.module, view.rows[attribute][0])
    if type(whole) is not nn.Parameter:
        raise NotImplementedError(
            "from_torch: a model with joined layers must be initialised before its weights are "
            f"sharded or held in FP8, got a {type(whole).__name__}"
        )
    value = view.part(attribute)
    assert isinstance(value, torch.Tensor)
    parameter = nn.Parameter(value.detach().contiguous(), whole.requires_grad)
    if getattr(whole, "_is_hf_initialized", False):
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    return parameter


def init_joined_layers(model: nn.Module) -> None:
    """Replaces ``_init_weights`` on Hugging Face's models in ``model``, on the instances."""
    for module in matching.pretrained_models(model):
        if "_init_weights" not in vars(module):
            vars(module)["_init_weights"] = InitWeights(module)
