"""Summary of the layers that ``from_torch`` converted and left, with reasons."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

__all__ = ["ConversionSummary", "Layer", "conversion_summary"]

ATTRIBUTE = "_apex_te_conversion"


class Layer(NamedTuple):
    """A layer that ``from_torch`` converted or left.

    Attributes:
        name: the layer's name in the model.
        before: its class before.
        after: its class after, None if it was left.
        reason: why it was left, None if it was converted.
    """

    name: str
    before: str
    after: str | None
    reason: str | None = None


class ConversionSummary:
    """Layers that ``from_torch`` converted and left, in the model's order.

    Attributes:
        converted: a ``Layer`` for each layer that now computes in FP8 or as a fused norm.
        kept: a ``Layer`` for each layer that was left, with the reason.
    """

    def __init__(self, layers: Iterable[Layer] = ()) -> None:
        layers = tuple(layers)
        self.converted = tuple(layer for layer in layers if layer.after is not None)
        self.kept = tuple(layer for layer in layers if layer.after is None)

    def __repr__(self) -> str:
        """Lists the layers; those whose names differ by numbers share a line."""
        lines = [f"ConversionSummary: {len(self.converted)} converted, {len(self.kept)} kept"]
        for title, layers in (("converted", self.converted), ("kept", self.kept)):
            groups: dict[tuple, int] = {}
            for layer in layers:
                name = re.sub(r"(?<![^.])\d+(?![^.])", "*", layer.name)
                key = (name or "(the model)", layer.before, layer.after, layer.reason)
                groups[key] = groups.get(key, 0) + 1
            if groups:
                lines.append(f"{title}:")
            for (name, before, after, reason), count in groups.items():
                text = f"{before} -> {after}" if after is not None else f"{before}: {reason}"
                lines.append(f"  {name} ({count}): {text}" if count > 1 else f"  {name}: {text}")
        return "\n".join(lines)


def conversion_summary(model: nn.Module) -> ConversionSummary:
    """Returns the layers that ``from_torch(model)`` converted and kept; none for another model."""
    found = vars(model).get(ATTRIBUTE)
    return ConversionSummary() if found is None else found
