"""Functions whose arguments amp casts: decorators, registrations, and apex's first interface.

They cast while a model of level O1 or O4 is prepared, and not in ``disable_casts``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ....amp._model import cast_floats
from ._amp_state import amp_state
from .handle import AmpHandle, NoOpHandle, registered

_Function = Callable[..., Any]


def half_function(fn: _Function) -> _Function:
    """Returns a function that casts floating-point arguments to float16 while amp casts."""
    return _casting(fn, lambda values: cast_floats(values, torch.float16))


def bfloat16_function(fn: _Function) -> _Function:
    """Returns a function that casts floating-point arguments to bfloat16 while amp casts."""
    return _casting(fn, lambda values: cast_floats(values, torch.bfloat16))


def float_function(fn: _Function) -> _Function:
    """Returns a function that casts floating-point arguments to float32 while amp casts."""
    return _casting(fn, lambda values: cast_floats(values, torch.float32))


def promote_function(fn: _Function) -> _Function:
    """Returns a function that casts floating-point arguments to their widest dtype.

    It does so while amp casts.
    """
    return _casting(fn, _promote)


def _promote(values: Any) -> Any:
    tensors = [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]
    dtypes = [x.dtype for x in tensors if x.is_floating_point()]
    return cast_floats(values, functools.reduce(torch.promote_types, dtypes)) if dtypes else values


def _casting(fn: _Function, cast: Callable[[Any], Any]) -> _Function:
    if not callable(fn):
        raise TypeError(f"amp: fn must be a function, got {type(fn).__name__}")

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if amp_state.casts():
            args, kwargs = cast((args, kwargs))
        return fn(*args, **kwargs)

    return call


def register_half_function(module: ModuleType, name: str) -> None:
    """Makes the next ``initialize`` replace ``module.name`` by its ``half_function``.

    Raises:
        ValueError: ``module`` does not define ``name``.
    """
    _register(module, name, half_function)


def register_bfloat16_function(module: ModuleType, name: str) -> None:
    """Makes the next ``initialize`` replace ``module.name`` by its ``bfloat16_function``.

    Raises:
        ValueError: ``module`` does not define ``name``.
    """
    _register(module, name, bfloat16_function)


def register_float_function(module: ModuleType, name: str) -> None:
    """Makes the next ``initialize`` replace ``module.name`` by its ``float_function``.

    Raises:
        ValueError: ``module`` does not define ``name``.
    """
    _register(module, name, float_function)


def register_promote_function(module: ModuleType, name: str) -> None:
    """Makes the next ``initialize`` replace ``module.name`` by its ``promote_function``.

    Raises:
        ValueError: ``module`` does not define ``name``.
    """
    _register(module, name, promote_function)


def _register(module: Any, name: str, decorate: Callable[[_Function], _Function]) -> None:
    if not hasattr(module, name):
        raise ValueError(
            f"amp.register_{decorate.__name__}: name must be a function of "
            f"{getattr(module, '__name__', module)}, got {name!r}"
        )
    registered.append((module, name, decorate))


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    patch_type: torch.dtype = torch.float16,
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> AmpHandle | NoOpHandle:
    """Starts the casts of decorated and registered functions, without a model.

    This is apex's first interface, from which only the casts are left: ``initialize`` prepares
    models, whose forwards run under ``torch.autocast``.

    Args:
        enabled: False casts nothing.
        loss_scale, patch_type, enable_caching, allow_banned: no effect.
        verbose: only what the handle's ``verbose`` returns.

    Returns:
        The handle, whose ``scale_loss`` raises RuntimeError, as in apex. It replaces the earlier
        call's handle, whose casts end.
    """
    if amp_state.handle is not None:
        amp_state.handle.deactivate()
    handle = AmpHandle([], verbose) if enabled else NoOpHandle()
    amp_state.handle = handle
    return handle
