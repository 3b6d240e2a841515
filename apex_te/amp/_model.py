"""Preparation of a model for an opt level: its ``forward``, dtypes and state dict."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ..fp8.autocast import fp8_autocast
from ..optimizers._bucket import needs_copy
from ..recipe import Recipe
from .levels import Properties


@dataclasses.dataclass(frozen=True)
class Casts:
    """Casts and contexts around a forward; ``autocast`` and ``recipe`` exclude each other."""

    inputs: torch.dtype | None
    outputs: torch.dtype | None
    autocast: torch.dtype | None
    recipe: Recipe | None


class AmpForward:
    """Callable that replaces ``model.forward`` on the instance, and adds casts.

    In a copy or pickle of the model it calls the copy. ``inner`` is the ``forward`` that the
    instance had before, or None. ``torch.autocast`` applies to the device of ``probe``.
    """

    __slots__ = ("__weakref__", "casts", "handles", "inner", "model", "probe")

    def __init__(self, model: torch.nn.Module, casts: Casts) -> None:
        self.model = model
        self.casts = casts
        # Another tool may have put a forward on the instance.
        self.inner: Callable[..., Any] | None = model.__dict__.get("forward")
        self.probe = next(model.parameters(), None)
        self.handles: list[Any] = []

    @property
    def __signature__(self) -> inspect.Signature:
        """Returns the signature of the original forward."""
        return inspect.signature(self._forward())

    def _forward(self) -> Callable[..., Any]:
        """Returns the original forward, bound to the model."""
        if self.inner is not None:
            return self.inner
        model = self.model
        return type(model).forward.__get__(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        casts = self.casts
        if casts.inputs is not None:
            args = cast_floats(args, casts.inputs)
            kwargs = cast_floats(kwargs, casts.inputs)
        forward: Callable[..., Any] | None = self.inner
        if forward is None:  # not bound, which torch.compile could not trace
            forward, args = type(self.model).forward, (self.model, *args)
        if casts.autocast is not None:
            device_type = "cpu" if self.probe is None else self.probe.device.type
            with torch.autocast(device_type, dtype=casts.autocast):
                out = forward(*args, **kwargs)
        elif casts.recipe is not None:
            with fp8_autocast(True, casts.recipe):
                out = forward(*args, **kwargs)
        else:
            out = forward(*args, **kwargs)
        return out if casts.outputs is None else cast_floats(out, casts.outputs)


def cast_floats(values: Any, dtype: torch.dtype) -> Any:
    """Returns nested containers with their floating-point tensors, except FP8, in ``dtype``."""
    return tree_map_only(torch.Tensor, lambda x: _cast_tensor(x, dtype), values)


def _cast_tensor(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype) if x.is_floating_point() and x.element_size() > 1 else x


def prepare_model(model: torch.nn.Module, chosen: Properties) -> torch.nn.Module:
    """Converts layers of ``model`` to FP8, casts its parameters and wraps its forward, in place."""
    release_model(model)
    recipe = None if chosen.make_recipe is None else chosen.make_recipe()
    if recipe is not None:
        from ..integrations import from_torch  # not needed otherwise

        model = from_torch(model)
    dtype, outputs = chosen.cast_model_type, chosen.cast_model_outputs
    if dtype is not None:
        _cast_model(model, dtype, bool(chosen.keep_batchnorm_fp32))
    autocast = chosen.autocast_type if chosen.patch_torch_functions else None
    casts = Casts(dtype, outputs, autocast, recipe)
    if casts == Casts(None, None, None, None):
        return model
    forward = AmpForward(model, casts)
    if dtype is not None and dtype is not torch.float32:
        for module in model.modules():
            forward.handles.append(module.register_state_dict_post_hook(_float32_state_dict))
    model.forward = forward
    return model


def release_model(model: torch.nn.Module) -> None:
    """Removes the forward and hooks of ``prepare_model``; dtypes and layers' classes stay."""
    forward = model.__dict__.get("forward")
    if not isinstance(forward, AmpForward):
        return
    for handle in forward.handles:
        handle.remove()
    if forward.inner is None:
        del model.forward
    else:
        model.forward = forward.inner


def _cast_model(model: torch.nn.Module, dtype: torch.dtype, keep_batchnorm: bool) -> None:
    """Casts parameters and buffers to ``dtype``; ``keep_batchnorm`` has batch norms in float32."""
    batch_norm = torch.nn.modules.batchnorm._BatchNorm
    for module in model.modules():
        if keep_batchnorm and isinstance(module, batch_norm):
            module._apply(lambda x: x.float() if x.is_floating_point() else x, recurse=False)
        else:
            module._apply(lambda x: _cast_tensor(x, dtype), recurse=False)


def _float32_state_dict(
    module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """Converts 16-bit entries of a state dict to float32, except FP8 parameters (a post-hook)."""
    for name in (*module._parameters, *module._buffers):
        value = state_dict.get(prefix + name)
        # A Parameter means keep_vars=True, whose caller wants the very object.
        if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
            is_half = value.dtype in (torch.float16, torch.bfloat16)
            if is_half and not needs_copy(value):
                state_dict[prefix + name] = value.float()
