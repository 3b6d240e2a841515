"""Loading of state dicts in the layout of a checkpoint's files, as Trainer's resuming does."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from ...module._core.fp8_module import STATE_PREFIX
from .holding import matrix_of, parameter_of, widened_to
from .mapping import Held


class FileLayout:
    """Hook of a model that makes a state dict's codes and scales FP8 Parameters, which it loads."""

    def __call__(self, model: Any, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Replaces entries of ``state_dict``, in place, before it is loaded."""
        quantizer = model.hf_quantizer
        found = {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
        for name, value, keys in _joined(model, found):
            for key in keys:
                state_dict.pop(prefix + key, None)
                found.pop(key, None)
            found[name] = state_dict[prefix + name] = value
        held: Held
        for name, held in quantizer.held.items():
            codes = found.get(name)
            owner = name.rpartition(".")[0]
            scale = found.get(f"{owner}.{held.scale}")
            if type(codes) is not torch.Tensor or codes.dtype is not torch.float8_e4m3fn:
                continue
            if scale is None:
                continue  # the module reports it
            recipe = quantizer.recipes[name]
            if name.endswith("down_proj") and len(held.shape) == 3:
                codes = widened_to(model.get_parameter(name).shape[-1], codes)
            state_dict[prefix + name] = parameter_of(codes, matrix_of(scale, held), held, recipe)
            for other in (held.scale, held.input_scale):
                state_dict.pop(f"{prefix}{owner}.{other}", None)


def _joined(model: Any, state: dict[str, Any]) -> list[tuple[str, Any, set[str]]]:
    """Returns what transformers renames and joins of files' tensors, and the files' keys."""
    conversions = getattr(model, "_weight_conversions", None) or ()
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    modules = {name for name, _ in model.named_modules()}
    made: dict[str, Any] = {}
    found: list[tuple[str, Any, set[str]]] = []
    for key in sorted(state, key=dot_natural_key):
        if key.rpartition(".")[0].removesuffix(STATE_PREFIX[:-1]).rstrip(".") in modules:
            continue  # a name of the model's
        name, pattern = rename_source_key(key, renamings, converters)
        if pattern is not None:
            own = next(c for c in converters if pattern in c.source_patterns)
            made.setdefault(name, copy.deepcopy(own)).add_tensor(name, key, pattern, state[key])
        elif name != key:
            found.append((name, state[key], {key}))
    for name, converter in made.items():
        keys = set().union(*converter.layer_targets.values())
        for target, value in converter.convert(name, model=model, config=model.config).items():
            found.append((target, value[0] if isinstance(value, list) else value, keys))
    return found
