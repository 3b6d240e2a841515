"""Summary of the layers that ``from_torch`` converted and kept, with reasons."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from ..runtime.model_argument import check_model
from ..runtime.named_arguments import named_arguments

__all__ = ["ConversionSummary", "Layer", "conversion_summary", "numbered"]

ATTRIBUTE = "_apex_te_conversion"


class Layer(NamedTuple):
    """Layer that ``from_torch`` converted or kept, as the summary lists it.

    Attributes:
        name: the layer's dotted name in the model.
        before: name of its class before; for a joined layer, names of the layers it is made of.
        after: name of its class after, None if the layer was kept.
        reason: reason why the layer was kept, None if it was converted.
    """

    name: str
    before: str
    after: str | None
    reason: str | None = None


def numbered(name: str) -> str:
    """Returns a dotted name with ``*`` for each of its parts that is a number."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


class ConversionSummary:
    """Layers that ``from_torch`` converted and kept: joined ones first, then in the model's order.

    Args:
        layers: an entry for each layer that was converted or kept.

    Attributes:
        converted: the entries of layers that became modules of apex_te.
        kept: the entries of layers that stayed as they were, with the reason.
    """

    def __init__(self, layers: Iterable[Layer] = ()) -> None:
        layers = tuple(layers)
        self.converted = tuple(layer for layer in layers if layer.after is not None)
        self.kept = tuple(layer for layer in layers if layer.after is None)

    def __repr__(self) -> str:
        """Returns a list of the layers, in which names that differ only by numbers share a line."""
        lines = [f"ConversionSummary: {len(self.converted)} converted, {len(self.kept)} kept"]
        for title, layers in (("converted", self.converted), ("kept", self.kept)):
            groups: dict[tuple, int] = {}
            for layer in layers:
                key = (
                    numbered(layer.name) or "(the model)",
                    layer.before,
                    layer.after,
                    layer.reason,
                )
                groups[key] = groups.get(key, 0) + 1
            if groups:
                lines.append(f"{title}:")
            for (name, before, after, reason), count in groups.items():
                text = f"{before} -> {after}" if after is not None else f"{before}: {reason}"
                lines.append(f"  {name} ({count}): {text}" if count > 1 else f"  {name}: {text}")
        return "\n".join(lines)


@named_arguments()
def conversion_summary(model: nn.Module) -> ConversionSummary:
    """Returns the layers that ``from_torch(model)`` has converted and kept.

    Args:
        model: the model that was given to ``from_torch``; for any other the summary is empty.
    """
    check_model("conversion_summary", model)
    found = vars(model).get(ATTRIBUTE)
    return ConversionSummary() if found is None else found
