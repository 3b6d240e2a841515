"""Class names as ``print(model)`` and summaries show them: apex_te's differ from torch's."""

from __future__ import annotations

import torch


def class_name(kind: type) -> str:
    """Returns ``apex_te.Linear``, ``torch.nn.Linear``, or the bare name of any other class."""
    package = kind.__module__.split(".")
    if package[0] == "apex_te":
        return f"apex_te.{kind.__name__}"
    return f"torch.nn.{kind.__name__}" if package[:2] == ["torch", "nn"] else kind.__name__


def shown_name(module: torch.nn.Module) -> str:
    """Returns the class name for ``repr``; a user's subclass keeps its own."""
    return class_name(type(module))
