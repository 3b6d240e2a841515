"""Statistics of what the modules of a model quantize: amax, scale, saturation, underflow."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import torch

from .autocast import Region, local
from .module._fp8_module import FP8Module
from .quantizer import QuantizerSets
from .quantizer.base import Quantizer
from .quantizer.observed import COUNTS, FIELDS, measure, observed_sets
from .tensor import QuantizedTensor

__all__ = ["fp8_statistics"]

ROLES = ("input", "weight", "grad_output")
SERIES = (
    "amax", "scale_min", "scale_max", "saturation_rate", "underflow_rate", "nonfinite",
)  # fmt: skip


class fp8_statistics:
    """Notes what the FP8 modules of ``model`` quantize while it is entered; a context manager.

    One entry for each module, GEMM, role (input, weight, grad_output) and step; a step is one
    outermost ``fp8_autocast`` region entered with grad enabled. Evaluation, recomputation, weights
    that are cached or held in FP8, what torch.compile or a CUDA graph runs, and a GroupedLinear on
    the GPU whose ``m_splits`` are a tensor are not noted. Results do not change. The figures stay
    on the device, with no synchronisation, until they are asked for; a noted step reads each tensor
    a few times more.

    Args:
        model: holds FP8 modules; those of it that run in FP8 are noted.
        every: note one step in so many.
        capacity: noted steps to keep; the oldest make room.

    Errors: TypeError for a wrong type, ValueError for a wrong value or a model without FP8 modules,
    RuntimeError for a model that is being observed already.
    """

    def __init__(self, model: torch.nn.Module, every: int = 1, capacity: int = 1000) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"fp8_statistics: model must be a torch.nn.Module, got {type(model).__name__}"
            )
        for name, value in (("every", every), ("capacity", capacity)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(
                    f"fp8_statistics: {name} must be an int, got {type(value).__name__}"
                )
            if value < 1:
                raise ValueError(f"fp8_statistics: {name} must be at least 1, got {value}")
        self._modules = [
            (path, module)
            for path, module in model.named_modules()
            if isinstance(module, FP8Module)
        ]
        if not self._modules:
            raise ValueError(
                f"fp8_statistics: model must contain an FP8 module, got {type(model).__name__}"
            )
        self.model = model
        self.every = every
        self.capacity = capacity
        self._names: list[str] = []
        self._first_slots: list[int] = []
        owners = _owners(self._modules)
        for owner, (_, module) in zip(owners, self._modules, strict=True):
            self._first_slots.append(len(self._names))
            self._names += _names(owner, module._fp8.gemms)
        self._rings: dict[torch.device, torch.Tensor] = {}
        self._region: Region | None = None
        self._step = -1
        self._steps: list[int] = []  # of each noted step, in order
        self._noting = False

    def __enter__(self) -> fp8_statistics:
        states = [module._fp8 for _, module in self._modules]
        if any(state._wrap is not None for state in states):
            raise RuntimeError("fp8_statistics: model must be observed once at a time, got twice")
        for state, first in zip(states, self._first_slots, strict=True):
            state.observe(self._observer(first))
        return self

    def _observer(self, first: int) -> Callable[[QuantizerSets], QuantizerSets]:
        """What wraps the quantizers of a module whose slots begin at ``first``."""

        def note(gemm: int, role: str, x: Any, quantized: Any, quantizer: Any) -> None:
            self._note(first + gemm * len(ROLES) + ROLES.index(role), x, quantized, quantizer)

        return lambda sets: observed_sets(sets, note)

    def __exit__(self, *exc: object) -> None:
        self._noting = False
        self._region = None
        for _, module in self._modules:
            module._fp8.observe(None)

    def _note(
        self, slot: int, x: torch.Tensor, quantized: QuantizedTensor, quantizer: Quantizer
    ) -> None:
        """Add a tensor to the current step; gradients belong to the region entered last."""
        if slot % len(ROLES) != ROLES.index("grad_output"):
            self._enter(local.region)
        if not self._noting:
            return
        found = measure(x, quantized, quantizer)
        if found is None:
            return
        # A module may run more than once in a step.
        row = self._ring(x.device)[(len(self._steps) - 1) % self.capacity, slot]
        with torch.no_grad():
            row[:COUNTS] += found[:COUNTS]
            torch.maximum(row[COUNTS:], found[COUNTS:], out=row[COUNTS:])

    def _enter(self, region: Region | None) -> None:
        """Begin a step if the outermost region is another than before."""
        while region is not None and region.outer is not None and region.outer.in_fp8:
            region = region.outer
        if region is None or region is self._region:
            return
        self._region = region
        self._step += 1
        self._noting = self._step % self.every == 0
        if self._noting:
            self._steps.append(self._step)
            for ring in self._rings.values():
                ring[(len(self._steps) - 1) % self.capacity].zero_()

    def _ring(self, device: torch.device) -> torch.Tensor:
        """The notes on ``device``: float64 [capacity, slots, fields]."""
        ring = self._rings.get(device)
        if ring is None:
            shape = (self.capacity, len(self._names), len(FIELDS))
            with torch.inference_mode(False):
                ring = torch.zeros(shape, dtype=torch.float64, device=device)
            self._rings[device] = ring
        return ring

    def to_dict(self) -> dict[str, dict[str, list]]:
        """For each tensor that was noted its series, oldest step first; waits for the device.

        Keys: ``"<module>.<role>"``, with ``.gemm<n>`` between where a module has several GEMMs.
        Series: ``step``; ``amax`` of the finite elements; ``scale_min`` and ``scale_max``, which
        differ where a tensor has a scale for each block; ``saturation_rate``, the share of elements
        with ``|x * scale|`` above the format's largest value; ``underflow_rate``, the share of
        non-zero elements whose code is zero; ``nonfinite``, the number of NaN and infinities, which
        count as neither.
        """
        last = len(self._steps)
        noted = range(max(0, last - self.capacity), last)
        rows = [index % self.capacity for index in noted]
        copies = [ring.cpu()[rows] for ring in self._rings.values()] if rows else []
        result: dict[str, dict[str, list]] = {}
        for slot, name in enumerate(self._names):
            series: dict[str, list] = {key: [] for key in ("step", *SERIES)}
            for at, index in enumerate(noted):
                for copied in copies:
                    values = dict(zip(FIELDS, copied[at, slot].tolist(), strict=True))
                    if values["elements"]:
                        series["step"].append(self._steps[index])
                        _append(series, values)
            if series["step"]:
                result[name] = series
        return result

    def table(self) -> str:
        """A line for each tensor: last amax and scale, mean and worst rates of the steps kept."""
        head = ("tensor", "steps", "amax", "scale", "saturated", "worst", "underflow", "worst",
                "NaN/Inf")  # fmt: skip
        lines: list[tuple[str, ...]] = [head]
        for name, series in self.to_dict().items():
            low, high = series["scale_min"][-1], series["scale_max"][-1]
            scale = f"{low:.4g}" if math.isclose(low, high) else f"{low:.4g} .. {high:.4g}"
            rates = []
            for key in ("saturation_rate", "underflow_rate"):
                values = series[key]
                rates += [f"{sum(values) / len(values):.3%}", f"{max(values):.3%}"]
            amax, nonfinite = f"{series['amax'][-1]:.4g}", str(sum(series["nonfinite"]))
            lines.append((name, str(len(series["step"])), amax, scale, *rates, nonfinite))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = []
        for first, *rest in lines:
            cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
            text.append("  ".join([first.ljust(widths[0]), *cells]))
        return "\n".join(text)

    def plot(self, path: str | os.PathLike) -> None:
        """Draw amax, scale, saturation and underflow over the steps into the file ``path``.

        Its ending chooses the format (png, svg, pdf). Errors: ImportError without matplotlib,
        ValueError when nothing was noted.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                'fp8_statistics: plot needs matplotlib (pip install "apex_te[demo]")'
            ) from error
        series = self.to_dict()
        if not series:
            raise ValueError("fp8_statistics: plot must have a noted step to draw, got none")
        figure = Figure(figsize=(11, 11), layout="constrained")
        panels = figure.subplots(4, 1, sharex=True)
        titles = ("amax", "scale", "saturation rate", "underflow rate")
        keys = ("amax", "scale_max", "saturation_rate", "underflow_rate")
        for axes, title, key in zip(panels, titles, keys, strict=True):
            for name, values in series.items():
                axes.plot(values["step"], values[key], marker=".", linewidth=0.8, label=name)
            positive = any(v > 0 for values in series.values() for v in values[key])
            if key in ("amax", "scale_max") and positive:
                axes.set_yscale("log")
            axes.set_ylabel(title)
            axes.grid(alpha=0.3)
        panels[-1].set_xlabel("step")
        handles, labels = panels[0].get_legend_handles_labels()
        columns = -(-len(labels) // 40)
        figure.legend(handles, labels, loc="outside right upper", fontsize=6, ncols=columns)
        figure.savefig(path)


def _owners(modules: list[tuple[str, Any]]) -> list[str]:
    """What to call each module: its name where it has one of its own, else its path."""
    paths = [path or type(module).__name__ for path, module in modules]
    given = [getattr(module, "name", None) for _, module in modules]
    return [
        name if name and given.count(name) == 1 and name not in paths else path
        for name, path in zip(given, paths, strict=True)
    ]


def _names(owner: str, gemms: int) -> list[str]:
    """The tensors of a module, in the order of their slots."""
    return [
        f"{owner}.{role}" if gemms == 1 else f"{owner}.gemm{gemm}.{role}"
        for gemm in range(gemms)
        for role in ROLES
    ]


def _append(series: dict[str, list], values: dict[str, float]) -> None:
    """Turn the counts of a step into the figures that a reader wants."""
    inverse, nonzero = values["scale_inv_max"], values["nonzero"]
    series["amax"].append(values["amax"])
    series["scale_min"].append(1.0 / inverse if inverse else math.inf)
    series["scale_max"].append(values["scale_max"])
    series["saturation_rate"].append(values["saturated"] / values["elements"])
    series["underflow_rate"].append(values["underflowed"] / nonzero if nonzero else 0.0)
    series["nonfinite"].append(int(values["nonfinite"]))
