"""Queries of ``torch.autocast``: its state and its dtype on a device type."""

from __future__ import annotations

import torch

__all__ = ["autocast_dtype", "is_autocast"]


def is_autocast(device_type: str) -> bool:
    """Returns True if ``torch.autocast`` is on for a device type; never for the meta device."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def autocast_dtype(owner: str, name: str, x: torch.Tensor) -> torch.dtype | None:
    """The dtype that ``torch.autocast`` has for the device of ``x``; None where it is off.

    Raises:
        TypeError: it is on, and ``x``, the argument called ``name``, is no floating-point tensor.
    """
    device_type = x.device.type
    if not is_autocast(device_type):
        return None
    if not x.is_floating_point():
        raise TypeError(f"{owner}: {name} must be a floating-point tensor, got {x.dtype}")
    return torch.get_autocast_dtype(device_type)
