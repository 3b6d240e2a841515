"""Statistics of the tensors that a model casts to FP8: amax, scale, saturation, underflow."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ..runtime.named_arguments import check_ints, check_model
from .autocast import Region, local
from .module_fp8 import ModuleFP8
from .scheme import QuantizerSets
from .scheme.base import Quantizer
from .scheme.observed import COUNTS, FIELDS, measure, observed_sets
from .tensor import QuantizedTensor

__all__ = ["fp8_statistics"]

ROLES = ("input", "weight", "grad_output")
SERIES = (
    "amax", "scale_min", "scale_max", "saturation_rate", "underflow_rate", "nonfinite",
)  # fmt: skip


class fp8_statistics:
    """Context manager that records statistics of the tensors that a model casts to FP8.

    Each recorded step has one entry per module, GEMM and role (input, weight, grad_output). A step
    is one outermost ``fp8_autocast`` region entered with grad enabled. Evaluations, recomputes,
    weights that are cached or held in FP8, forwards run by ``torch.compile`` or a CUDA graph, and a
    ``GroupedLinear`` whose ``m_splits`` is a tensor on the GPU are not recorded. The model's
    results do not change. The statistics stay on the device, without synchronisation, until they
    are read. A recorded step reads each tensor a few extra times.

    Args:
        model: module whose FP8 modules are observed.
        every: record every this many steps, starting with the first.
        capacity: number of recorded steps that are kept; newer ones overwrite the oldest.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a number is below 1, or the model has no FP8 modules.
        RuntimeError: on entering, another ``fp8_statistics`` observes the model.
    """

    def __init__(self, model: torch.nn.Module, every: int = 1, capacity: int = 1000) -> None:
        check_model("fp8_statistics", model)
        check_ints("fp8_statistics", every=every, capacity=capacity)
        # By the instance: a wrapper of torch.compile has the attributes of what it wraps.
        self._modules = [
            (path, module)
            for path, module in model.named_modules()
            if isinstance(vars(module).get("_fp8"), ModuleFP8)
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
            self._names += _names(owner, module)
        self._rings: dict[torch.device, torch.Tensor] = {}
        self._region: Region | None = None
        self._step = -1
        self._steps: list[int] = []  # number of each recorded step, in order
        self._noting = False
        self._inside = self._was_entered = False

    def __repr__(self) -> str:
        if self._inside:
            state = "noting"
        elif self._was_entered:
            state = "left"
        else:
            state = "not entered: it notes inside of `with` only"
        return (
            f"fp8_statistics({type(self.model).__name__} with {len(self._modules)} FP8 module(s), "
            f"every={self.every}, capacity={self.capacity}, steps noted: {len(self._steps)}, "
            f"{state})"
        )

    def __enter__(self) -> fp8_statistics:
        members = [module._fp8 for _, module in self._modules]
        if any(member.observer is not None for member in members):
            raise RuntimeError("fp8_statistics: model must be observed once at a time, got twice")
        for member, first in zip(members, self._first_slots, strict=True):
            member.observe(self._observer(first))
        self._inside = self._was_entered = True
        return self

    def _observer(self, first: int) -> Callable[[QuantizerSets], QuantizerSets]:
        """Returns the function that wraps one module's quantizers so that each cast is recorded."""

        def note(gemm: int, role: str, x: Any, quantized: Any, quantizer: Any) -> None:
            self._note(first + gemm * len(ROLES) + ROLES.index(role), x, quantized, quantizer)

        return lambda sets: observed_sets(sets, note)

    def __exit__(self, *exc: object) -> None:
        self._noting = self._inside = False
        self._region = None
        for _, module in self._modules:
            module._fp8.observe(None)

    def _note(
        self, slot: int, x: torch.Tensor, quantized: QuantizedTensor, quantizer: Quantizer
    ) -> None:
        """Adds the measurements of a tensor to the current step."""
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
        """Begins a step if the outermost region around ``region`` is not that of the last call."""
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
        """Returns the ring buffer of a device, float64 ``[capacity, slots, len(FIELDS)]``."""
        ring = self._rings.get(device)
        if ring is None:
            shape = (self.capacity, len(self._names), len(FIELDS))
            with torch.inference_mode(False):
                ring = torch.zeros(shape, dtype=torch.float64, device=device)
            self._rings[device] = ring
        return ring

    def to_dict(self) -> dict[str, dict[str, list]]:
        """Returns the recorded series of each tensor, oldest step first; waits for the device.

        Warns if the context manager was never entered, so that nothing was recorded.

        Returns:
            A dict with keys ``"<module>.<role>"``, or ``"<module>.<gemm>.<role>"`` for a module
            with several GEMMs (``fc1`` and ``fc2`` of a ``LayerNormMLP``, ``gemm<n>`` of a
            ``GroupedLinear``). Each value is a dict of lists of equal length: ``step``; ``amax`` of
            the finite elements; ``scale_min`` and ``scale_max``, which differ if a tensor has a
            scale for each block; ``saturation_rate``, the share of elements with ``|x * scale|``
            above the format's largest value; ``underflow_rate``, the share of non-zero elements
            that become zero in FP8; ``nonfinite``, the number of NaN and infinities, which are
            neither saturated nor underflowed.
        """
        if not self._was_entered:
            warnings.warn(f"fp8_statistics: {self._nothing()}", stacklevel=2)
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

    def _nothing(self) -> str:
        """Returns the reason why nothing was recorded, for messages."""
        if not self._was_entered:
            return (
                "nothing was noted, because it was never entered: train inside of "
                "`with fp8_statistics(model) as stats:`"
            )
        return (
            "nothing was noted: none of the modules ran in a region of fp8_autocast entered with "
            "gradients, in eager mode"
        )

    def table(self) -> str:
        """Returns a text table with a line for each tensor, or one line that says why it is empty.

        The columns are the number of steps, the last amax and scale, the mean and worst rates of
        saturation and underflow over the kept steps, and the number of NaN and infinities.
        """
        if not self._steps:
            return f"fp8_statistics: {self._nothing()}"
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
        """Draws heat maps of amax, scale, saturation and underflow into the file ``path``.

        Rows are tensors in model order, columns are recorded steps. The file's suffix determines
        the format (png, svg, pdf).

        Raises:
            ImportError: matplotlib is missing.
            ValueError: nothing was recorded.
        """
        try:
            from matplotlib.colors import LogNorm
            from matplotlib.figure import Figure
            from matplotlib.ticker import MaxNLocator, PercentFormatter
        except ImportError as error:
            raise ImportError(
                'fp8_statistics: plot needs matplotlib (pip install "apex_te[demo]")'
            ) from error
        if not self._steps:
            raise ValueError(
                f"fp8_statistics: plot must have a noted step to draw, got none; {self._nothing()}"
            )
        series = self.to_dict()
        steps = sorted({step for values in series.values() for step in values["step"]})
        # 1000 pixels: a page shows the labels in their size.
        height = min(2.5 + 0.18 * len(series), 30.0)
        figure = Figure(figsize=(10, height), dpi=100, layout="constrained")
        panels = figure.subplots(1, 4, sharey=True)
        every = max(1, -(-len(steps) // 4))
        for axes, (title, key) in zip(panels, _PANELS.items(), strict=True):
            cells = _cells(series, steps, key)
            shown = [v for row in cells for v in row if math.isfinite(v) and v > 0]
            norm: dict[str, Any] = {"vmin": 0.0, "vmax": max(shown, default=1.0)}
            if shown and not key.endswith("rate"):  # zeros, which have no logarithm, stay white
                norm = {"norm": LogNorm(min(shown), max(max(shown), min(shown) * 1.01))}
            image = axes.imshow(
                cells, aspect="auto", interpolation="nearest", cmap="viridis", **norm
            )
            bar = figure.colorbar(image, ax=axes, orientation="horizontal", shrink=0.9)
            if key.endswith("rate"):
                bar.ax.xaxis.set_major_locator(MaxNLocator(2))
                bar.ax.xaxis.set_major_formatter(PercentFormatter(1.0))
            axes.set_title(title)
            axes.set_xlabel("step")
            axes.set_xticks(range(0, len(steps), every), [str(s) for s in steps[::every]])
        every = max(1, -(-len(series) // _LABELS))
        panels[0].set_yticks(range(0, len(series), every), list(series)[::every], fontsize=9)
        figure.savefig(path)


_PANELS = {
    "amax": "amax",
    "scale": "scale_max",
    "saturation rate": "saturation_rate",
    "underflow rate": "underflow_rate",
}
_LABELS = 150  # rows that can be told apart


def _cells(series: dict[str, dict[str, list]], steps: list[int], key: str) -> list[list[float]]:
    """Returns ``key`` as a row for each tensor and a column for each step, NaN if missing."""
    column = {step: i for i, step in enumerate(steps)}
    cells = [[math.nan] * len(steps) for _ in series]
    for row, values in zip(cells, series.values(), strict=True):
        for step, value in zip(values["step"], values[key], strict=True):
            row[column[step]] = value
    return cells


def _owners(modules: list[tuple[str, Any]]) -> list[str]:
    """Returns a unique label for each module: its ``name`` if no other has it, else its path."""
    paths = [path or type(module).__name__ for path, module in modules]
    given = [getattr(module, "name", None) for _, module in modules]
    return [
        name if name and given.count(name) == 1 and name not in paths else path
        for name, path in zip(given, paths, strict=True)
    ]


def _names(owner: str, module: Any) -> list[str]:
    """Returns the labels of a module's slots, ``<owner>.<role>`` or ``<owner>.<gemm>.<role>``."""
    gemms = module.fp8_state.gemms
    weights = module._gemm_weights()
    named = [names[0] for names in weights if len(names) == 1 and names[0].endswith("_weight")]
    if gemms == 1:
        owners = [owner]
    elif len(named) == gemms:
        owners = [f"{owner}.{name.removesuffix('_weight')}" for name in named]
    else:
        owners = [f"{owner}.gemm{gemm}" for gemm in range(gemms)]
    return [f"{gemm}.{role}" for gemm in owners for role in ROLES]


def _append(series: dict[str, list], values: dict[str, float]) -> None:
    """Appends the figures of a step to ``series``, with rates instead of counts."""
    inverse, nonzero = values["scale_inv_max"], values["nonzero"]
    series["amax"].append(values["amax"])
    series["scale_min"].append(1.0 / inverse if inverse else math.inf)
    series["scale_max"].append(values["scale_max"])
    series["saturation_rate"].append(values["saturated"] / values["elements"])
    series["underflow_rate"].append(values["underflowed"] / nonzero if nonzero else 0.0)
    series["nonfinite"].append(int(values["nonfinite"]))
