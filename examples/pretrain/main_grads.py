"""Sums of weight gradients in float32, to which the products of backward add by themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def allocate(blocks: nn.Module) -> None:
    """Gives each matrix of blocks that were made with ``main_grads`` its ``main_grad``.

    A router's products do not add to one.
    """
    for name, parameter in blocks.named_parameters():
        if parameter.dim() > 1 and not name.endswith("router.weight"):
            sums: Any = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
            parameter.main_grad = sums  # type: ignore[attr-defined]


def hand_over(model: nn.Module) -> None:
    """Has an optimizer with ``use_decoupled_grad`` read ``main_grad`` or, without one, ``grad``."""
    for parameter in model.parameters():
        main = getattr(parameter, "main_grad", None)
        gradient = parameter.grad if main is None else main
        parameter.decoupled_grad = gradient  # type: ignore[attr-defined]


def clear(model: nn.Module) -> None:
    """Fills every ``main_grad`` with zeros, after the optimizer's step."""
    for parameter in model.parameters():
        parameter.decoupled_grad = None  # type: ignore[attr-defined]
        main: Any = getattr(parameter, "main_grad", None)
        if main is not None:
            main.zero_()
