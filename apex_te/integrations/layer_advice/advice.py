"""``Advice``: what FP8 gains and costs for each layer of a model, as table, picture and JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from .layer import LayerAdvice

__all__ = ["Advice", "ExactName"]

ROLES = ("input", "weight", "grad_output")
_HEAD = ("layer", "class", "in", "out", "rows", "calls", "high ms", "FP8 ms", "gain",
         "amax x", "w", "dy", "SQNR x", "w", "dy", "advice")  # fmt: skip


class ExactName:
    """Predicate for ``exclude`` of ``from_torch`` that is true for the layer with one name alone.

    A name as text would also leave layers in whose names it is a part.

    Args:
        name: dotted name of the layer.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, name: str, module: nn.Module) -> bool:
        """Returns True if ``name`` is the layer's."""
        return name == self.name

    def __repr__(self) -> str:
        return f"ExactName({self.name!r})"


class Advice:
    """Result of ``apex_te.advise``.

    ``str`` and ``print`` give a table with a line for each layer: sizes, calls, milliseconds of one
    call in high precision and in FP8, forward and backward, amaxes and SQNR in dB of input, weight
    and output gradient, and the advice. Below it stand the time of all layers together, and the
    ``exclude`` list.

    Args:
        layers: the layers, in the model's order.
        recipe: the recipe, as text.
        device: the device, as text.

    Attributes:
        layers: the layers, each a ``LayerAdvice``.
        recipe: the recipe, as text.
        device: the device on which times were measured, as text.
    """

    def __init__(self, layers: Iterable[LayerAdvice], recipe: str, device: str) -> None:
        self.layers = tuple(layers)
        self.recipe, self.device = recipe, device

    @property
    def exclude(self) -> list[str | Callable[[str, nn.Module], bool]]:
        """Layers to keep in high precision, for ``from_torch(model, exclude=...)``.

        These are names; where a name is also a part of the name of a layer that FP8 serves, a
        predicate takes its place. Layers that ``from_torch`` leaves anyway are not in it.
        """
        chosen = [layer.name for layer in self.layers if layer.against and layer.kept is None]
        others = [layer.name for layer in self.layers if layer.name not in chosen]
        wide = {name for name in chosen if any(f".{name}." in f".{other}." for other in others)}
        return [ExactName(name) if name in wide or not name else name for name in chosen]

    def totals(self) -> dict[str, float]:
        """Returns milliseconds of one call of the sample, summed over the measured layers.

        Returns:
            "high": all in high precision; "fp8": all that ``from_torch`` converts in FP8;
            "advised": those in FP8 that the advice leaves to FP8.
        """
        found = dict.fromkeys(("high", "fp8", "advised"), 0.0)
        for layer in self.layers:
            if layer.times is None:
                continue
            high, fp8 = layer.times.high * layer.calls, layer.times.fp8 * layer.calls
            found["high"] += high
            found["fp8"] += high if layer.kept is not None else fp8
            found["advised"] += high if layer.kept is not None or layer.against else fp8
        return found

    def __str__(self) -> str:
        lines = [_HEAD, *map(_cells, self.layers)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [f"advise: {self.recipe} on {self.device}"]
        for cells in lines:
            left = [cell.ljust(width) for cell, width in zip(cells[:2], widths, strict=False)]
            right = [c.rjust(w) for c, w in zip(cells[2:-1], widths[2:-1], strict=True)]
            text.append("  ".join([*left, *right, cells[-1]]).rstrip())
        totals = self.totals()
        if totals["high"]:
            text.append(
                "all layers: {high:.3f} ms in high precision, {fp8:.3f} ms in FP8,"
                " {advised:.3f} ms as advised".format(**totals)
            )
        text.append(f"exclude={self.exclude!r}")
        return "\n".join(text)

    def __repr__(self) -> str:
        return f"Advice({len(self.layers)} layers, {len(self.exclude)} to exclude, {self.recipe})"

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns all figures as JSON, and writes them to the file ``path`` if that is given.

        Numbers that JSON has not, NaN and infinity, are null.
        """
        layers = []
        for layer in self.layers:
            entry: dict[str, Any] = layer._asdict()
            entry["times"] = layer.times and layer.times._asdict()
            entry["roles"] = {role: found._asdict() for role, found in layer.roles.items()}
            layers.append({**entry, "gain": layer.gain, "advice": layer.advice()})
        exclude = [layer.name for layer in self.layers if layer.against and layer.kept is None]
        found = {
            "recipe": self.recipe,
            "device": self.device,
            "layers": layers,
            "totals": self.totals(),
            "exclude": exclude,
        }
        text = json.dumps(_finite(found), indent=1, allow_nan=False)
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(f"{text}\n")
        return text

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws times and SQNR of the layers that ran into the file ``path``.

        The file's ending chooses the format (png, svg, pdf).

        Raises:
            ImportError: matplotlib is missing.
            ValueError: no layer ran.
        """
        from .picture import draw

        draw(self.layers, f"{self.recipe} on {self.device}", path)


def _finite(value: Any) -> Any:
    """Returns nested data with None for numbers that are NaN or infinite."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cells(layer: LayerAdvice) -> tuple[str, ...]:
    """Returns the table's cells of a layer."""

    def size(number: int) -> str:
        return str(number) if number else "-"

    times = ("-", "-", "-")
    if layer.times is not None:
        times = f"{layer.times.high:.3f}", f"{layer.times.fp8:.3f}", f"{layer.gain:.2f}x"
    found = [layer.roles.get(role) for role in ROLES]
    amaxes = [f"{role.amax:.3g}" if role else "-" for role in found]
    losses = [f"{role.sqnr:.1f}" if role else "-" for role in found]
    return (
        layer.name or "(the model)", layer.kind, size(layer.in_features),
        size(layer.out_features), size(layer.rows), size(layer.calls), *times, *amaxes, *losses,
        layer.advice(),
    )  # fmt: skip
