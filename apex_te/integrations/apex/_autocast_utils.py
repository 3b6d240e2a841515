"""Casts of arguments to the dtype of ``torch.autocast``, where that is active."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def call_autocast(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function, where autocast is active with arguments of its dtype and outside of it.

    The device is that of the first tensor; float64 tensors stay as they are.
    """
    device = next(arg.device.type for arg in args if isinstance(arg, torch.Tensor))
    if not torch.is_autocast_enabled(device):
        return function(*args)
    with torch.autocast(device, enabled=False):
        return function(*_cast(args, torch.get_autocast_dtype(device)))


def _cast(args: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    return tuple(
        arg.to(dtype)
        if isinstance(arg, torch.Tensor)
        and arg.is_floating_point()
        and arg.dtype is not torch.float64
        else arg
        for arg in args
    )


def _cast_if_autocast_enabled(*args: Any) -> tuple[Any, ...]:
    """Returns arguments with floating-point tensors in the dtype of CUDA's autocast, if active."""
    active = torch.is_autocast_enabled("cuda")
    return _cast(args, torch.get_autocast_dtype("cuda")) if active else args


def _get_autocast_dtypes() -> list[torch.dtype]:
    """Returns the dtypes of CUDA's autocast that this GPU supports."""
    if torch.cuda.is_available() and torch.cuda.is_bf16_supported():
        return [torch.half, torch.bfloat16]
    return [torch.half]


def _get_current_dtype(dtype: torch.dtype | None = None) -> torch.dtype:
    """Returns the dtype of CUDA's autocast, outside of it ``dtype`` or float32."""
    if torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda")
    return dtype or torch.float
