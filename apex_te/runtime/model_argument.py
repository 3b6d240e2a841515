"""The check of an argument that must be a model."""

from __future__ import annotations

from typing import Any

from torch import nn


def check_model(owner: str, model: Any) -> None:
    """Raises TypeError if ``model``, an argument of ``owner``, is not a module."""
    if isinstance(model, nn.Module):
        return
    got, todo = type(model).__name__, ""
    if isinstance(model, type):
        got, todo = f"the class {model.__name__}", f"; pass an instance, {model.__name__}(...)"
    elif isinstance(model, dict):
        todo = "; pass the model, not its state dict"
    raise TypeError(f"{owner}: model must be a torch.nn.Module, got {got}{todo}")
