"""Parameters on the meta device, and how they get memory and values."""

from __future__ import annotations

import torch


def initialize(module: torch.nn.Module) -> None:
    """Gives a new module's parameters their first values, unless they are on the meta device."""
    if not _is_on_meta(module):
        module.reset_parameters()  # type: ignore[operator]


def materialize(module: torch.nn.Module) -> None:
    """Moves a module's own parameters, not its children's, from the meta device to a real one.

    They get uninitialized memory on the default device, or on a GPU, if any, if that is the CPU.
    """
    if not _is_on_meta(module):
        return
    device = torch.get_default_device()
    if device.type == "cpu" and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type != "meta":
        module.to_empty(device=device, recurse=False)


def _is_on_meta(module: torch.nn.Module) -> bool:
    return any(p is not None and p.is_meta for p in module._parameters.values())
