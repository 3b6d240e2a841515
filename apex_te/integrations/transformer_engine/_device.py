"""Device on which alias modules put their parameters if they are given none."""

from __future__ import annotations

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

__all__ = ["current_gpu", "default_device"]

Device = torch.device | str | int | None


def default_device(device: Device) -> Device:
    """Returns the device for new parameters.

    Transformer Engine's default is ``"cuda"``. Here it is PyTorch's default device if a program has
    set one (``torch.set_default_device`` or ``with torch.device(...)``), else the current GPU, and
    the CPU where there is none.
    """
    if device is not None:
        return device
    # torch.get_default_device() does not tell a CPU that was asked for from none.
    if any(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack()):
        return torch.get_default_device()
    return current_gpu() or torch.device("cpu")


def current_gpu() -> torch.device | None:
    """Returns the current GPU; None where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return None
