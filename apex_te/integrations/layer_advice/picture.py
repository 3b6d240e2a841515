"""Picture of an ``Advice``: bars of times, and SQNR by role, for each layer."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from .layer import LayerAdvice

_LABELS = 150  # rows that can be told apart
_ROLES = {"input": "o", "weight": "s", "grad_output": "^"}


def draw(advised: Iterable[LayerAdvice], title: str, path: str | os.PathLike[str]) -> None:
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
