"""``Advice``: what FP8 gains and costs for each layer of a model, as table, picture and JSON."""

from __future__ import annotations

import json
import math
import os
import textwrap
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import nn

from ..summary import grouped
from .trial import RoleStatistics, Times

ROLES = ("input", "weight", "grad_output")
_HEAD = ("layer", "in", "out", "rows", "calls", "ms", "FP8 ms", "gain",
         "x dB", "w dB", "dy dB", "advice")  # fmt: skip
_TIMES = (5, 6, 7)  # columns of _HEAD
_WIDTH = 100
_NAME_WIDTH = 20
_LARGE = 2048  # sizes from which FP8 is usually faster on Hopper
_APART = (
    "Each layer ran alone. from_torch(model, fuse=True) joins layers that read one input, and their"
    " norms, which takes less time: run advise on its result for these times."
)
_NAMES = {"DelayedScaling": "delayed", "CurrentScaling": "tensorwise",
          "BlockScaling": "blockwise", "MXFP8Scaling": "mxfp8",
          "RowwiseScaling": "rowwise"}  # fmt: skip


class LayerAdvice(NamedTuple):
    """Measurements of one layer, and the resulting advice.

    Attributes:
        name: dotted name of the layer in the model.
        kind: name of its class.
        in_features, out_features: sizes of its weight; 0 if there are several.
        rows: number of rows of its input; 0 if it did not run.
        calls: number of calls in one forward of the sample.
        times: milliseconds of one call; None if it was not measured.
        roles: statistics by role, "input", "weight" and "grad_output"; a role is missing if its
            tensor was not cast to FP8.
        against: reasons to keep the layer in bf16 or fp32.
        kept: reason why ``from_torch`` does not convert the layer; None if it does.
    """

    name: str
    kind: str
    in_features: int
    out_features: int
    rows: int
    calls: int
    times: Times | None
    roles: dict[str, RoleStatistics]
    against: tuple[str, ...]
    kept: str | None

    @property
    def gain(self) -> float:
        """Time in bf16 or fp32 divided by time in FP8; NaN if they were not measured."""
        return self.times.high / self.times.fp8 if self.times else math.nan

    def advice(self) -> str:
        """Returns the advice as a phrase, such as "FP8" or "keep: <reasons>"."""
        if self.kept is not None:
            return f"kept: {self.kept}"
        if self.times is None:
            return "did not run"
        return f"keep: {'; '.join(self.against)}" if self.against else "FP8"


class ExactName:
    """Predicate for ``exclude`` of ``from_torch`` that is true only for the layer with this name.

    A name given as text would also exclude layers whose names contain it.
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

    ``str`` and ``print`` give the verdict, a sentence on SQNR, and a table with one line per layer:
    sizes, calls, milliseconds of one call (forward and backward, if times count) without FP8 and in
    FP8, SQNR in dB of input, weight and output gradient, and the advice. Reasons, the time of all
    layers together, and the ``exclude`` list follow.

    Args:
        layers: the layers, in the model's order.
        recipe: the recipe, as text.
        device: the device, as text.
        timed: True if times count for the advice.
        apart: True if separate torch layers ran, which ``fuse=True`` could join.

    Attributes:
        layers: the layers, each a ``LayerAdvice``.
        recipe: the recipe, as text.
        device: the device on which times were measured, as text.
        timed: True if times count for the advice.
        apart: as the argument.
    """

    def __init__(
        self,
        layers: Iterable[LayerAdvice],
        recipe: str,
        device: str,
        timed: bool = True,
        apart: bool = False,
    ) -> None:
        self.layers = tuple(layers)
        self.recipe, self.device, self.timed, self.apart = recipe, device, timed, apart

    @property
    def exclude(self) -> list[str | Callable[[str, nn.Module], bool]]:
        """Layers to keep in bf16 or fp32, for ``from_torch(model, exclude=...)``.

        Layers are listed by name, or by a predicate if the name is also part of the name of a layer
        that should run in FP8. Layers that ``from_torch`` does not convert anyway are left out.
        """
        chosen = [layer.name for layer in self.layers if layer.against and layer.kept is None]
        others = [layer.name for layer in self.layers if layer.name not in chosen]
        wide = {name for name in chosen if any(f".{name}." in f".{other}." for other in others)}
        return [ExactName(name) if name in wide or not name else name for name in chosen]

    def totals(self) -> dict[str, float]:
        """Returns milliseconds of one call of the sample, summed over the measured layers.

        Returns:
            "high": all in bf16 or fp32; "fp8": all layers that ``from_torch`` converts in FP8;
            "advised": in FP8 only the layers for which the advice is FP8.
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

    def verdict(self) -> str:
        """Returns one sentence: whether to use the recipe, its gain, and which layers to exclude.

        If times do not count, as on a CPU, it is based on sizes and SQNR.
        """
        open_ = [x for x in self.layers if x.kept is None and x.rows]
        good = [x for x in open_ if not x.against]
        name = self.recipe.partition("(")[0]
        name = _NAMES.get(name, name)
        if not good:
            why = "no layer is faster and precise enough" if self.timed else "by sizes and SQNR"
            return f"Do not use {name} for this model: {why}."
        kept = _listed([x.name for x in self.layers if x.kept or (x.rows and x not in good)])
        keep = f"; keep {kept} out of FP8" if kept else ""
        if self.timed:
            totals = self.totals()
            gain = totals["high"] / totals["advised"]
            if gain < 1:
                return f"Do not use {name} for this model: {gain:.2f}x as fast."
            return f"Use {name}: {gain:.2f}x as fast{keep}."
        large = sum(min(x.in_features, x.out_features) >= _LARGE for x in good)
        return (
            f"{name} fits {len(good)} of {len(open_)} layers by sizes and SQNR{keep};"
            f" {large or 'none'} of these with both sizes at least {_LARGE}, from which FP8 is"
            " usually faster; run advise on a GPU for times."
        )

    def precision(self) -> str:
        """Returns one sentence on SQNR alone: the lowest, and the layers below the limits."""
        worst = min(
            ((found.sqnr, role, x.name) for x in self.layers for role, found in x.roles.items()),
            default=None,
        )
        if worst is None:
            return "SQNR: no layer was cast to FP8."
        low = [x.name for x in self.layers if any("SQNR" in r or "NaN" in r for r in x.against)]
        told = f"too low or not finite in {_listed(low)}" if low else "high enough in every layer"
        return f"SQNR is {told}; lowest: {worst[0]:.1f} dB, {worst[1]} of {_short(worst[2])}."

    def __str__(self) -> str:
        rows = [_HEAD, *map(_cells, self.layers)]
        lines = [[c for i, c in enumerate(row) if self.timed or i not in _TIMES] for row in rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        gap = "  " if sum(widths) + 2 * len(widths) <= _WIDTH else " "
        text = [self.verdict(), self.precision(), f"advise: {self.recipe} on {self.device}"]
        text = [line for part in text for line in _wrapped(part)]
        for cells in lines:
            right = [c.rjust(w) for c, w in zip(cells[1:-1], widths[1:-1], strict=True)]
            text.append(gap.join([cells[0].ljust(widths[0]), *right, cells[-1]]).rstrip())
        reasons: dict[str, list[str]] = {}
        for layer in self.layers:
            if layer.kept is not None or layer.against:
                reasons.setdefault(layer.advice(), []).append(layer.name)
        for reason, names in reasons.items():
            text += _wrapped(f"{_listed(names)}: {reason}")
        totals = self.totals()
        if self.timed and totals["high"]:
            text.append(
                "all layers: {high:.3f} ms without FP8, {fp8:.3f} ms in FP8,"
                " {advised:.3f} ms as advised".format(**totals)
            )
            if self.apart:
                text += _wrapped(_APART)
        text += _wrapped(f"exclude={self.exclude!r}")
        return "\n".join(text)

    def __repr__(self) -> str:
        return f"Advice({len(self.layers)} layers, {len(self.exclude)} to exclude, {self.recipe})"

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns all figures as JSON, and writes them to the file ``path`` if it is given.

        NaN and infinity become null, because JSON does not have them.
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
        """Plots times and SQNR of the measured layers, and writes the plot to the file ``path``.

        The file's extension chooses the format (png, svg, pdf).

        Raises:
            ImportError: matplotlib is missing.
            ValueError: no layer was measured.
        """
        _draw(self.layers, f"{self.recipe} on {self.device}", path)


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
    losses = [f"{role.sqnr:.1f}" if role else "-" for role in found]
    return (
        _short(layer.name), size(layer.in_features), size(layer.out_features), size(layer.rows),
        size(layer.calls), *times, *losses, layer.advice().partition(":")[0],
    )  # fmt: skip


def _short(name: str) -> str:
    """Returns a dotted name without its first parts if it is too wide for the table."""
    parts = name.split(".")
    while len(parts) > 1 and len(".".join(parts)) > _NAME_WIDTH:
        del parts[0]
    text = ".".join(parts) or "(the model)"
    return text if text in (name, "(the model)") else f"..{text}"


def _listed(names: list[str]) -> str:
    """Returns up to three groups of names, and how many more there are."""
    groups = grouped(names)
    left = len(groups) - 3
    more = f" and {left} more group{'s' * (left > 1)}" if left > 0 else ""
    return ", ".join(groups[:3]) + more


def _wrapped(text: str) -> list[str]:
    """Returns the lines of a paragraph, further ones indented."""
    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)


_LABELS = 150  # rows that can be told apart
_ROLES = {"input": "o", "weight": "s", "grad_output": "^"}


def _draw(advised: Iterable[LayerAdvice], title: str, path: str | os.PathLike[str]) -> None:
    """Draws times and SQNR of the layers that ran into the file ``path``."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('Advice: plot needs matplotlib (pip install "apex_te[demo]")') from error
    layers = [layer for layer in advised if layer.times is not None]
    if not layers:
        raise ValueError("Advice: plot must have a layer that ran to draw, got none")
    figure = Figure(figsize=(12, min(2.0 + 0.25 * len(layers), 40.0)), layout="constrained")
    figure.suptitle(title, fontsize=9)
    times, losses = figure.subplots(1, 2, sharey=True)
    _draw_times(times, layers)
    _draw_losses(losses, layers)
    every = max(1, -(-len(layers) // _LABELS))
    labels = [layer.name or "(the model)" for layer in layers][::every]
    times.set_yticks(range(0, len(layers), every), labels, fontsize=6)
    times.set_ylim(len(layers) - 0.4, -0.6)  # in the model's order from above
    figure.savefig(path)


def _draw_times(axes: Any, layers: list[LayerAdvice]) -> None:
    """Draws two bars for each layer: milliseconds in bf16 or fp32 and in FP8."""
    places = range(len(layers))
    high = [layer.times.high * layer.calls for layer in layers if layer.times]
    fp8 = [layer.times.fp8 * layer.calls for layer in layers if layer.times]
    colors = ["tab:gray" if layer.kept or layer.against else "tab:green" for layer in layers]
    axes.barh([y - 0.2 for y in places], high, 0.4, color="tab:blue", label="high precision")
    axes.barh([y + 0.2 for y in places], fp8, 0.4, color=colors, label="FP8 (gray: not advised)")
    axes.set_xlabel("ms, forward and backward")
    axes.legend(fontsize=7)


def _draw_losses(axes: Any, layers: list[LayerAdvice]) -> None:
    """Draws a mark for the SQNR of each role of each layer."""
    for role, marker in _ROLES.items():
        points = [(y, layer.roles[role].sqnr) for y, layer in enumerate(layers)
                  if role in layer.roles]  # fmt: skip
        axes.plot([x for _, x in points], [y for y, _ in points], marker, label=role, alpha=0.7)
    axes.set_xlabel("SQNR, dB")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=7)
