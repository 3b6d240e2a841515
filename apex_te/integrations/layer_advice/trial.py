"""Trial of one layer in bf16 or fp32 and FP8: times, amax values and losses by quantization."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ...fp8.autocast import fp8_autocast
from ...fp8.module_fp8 import ModuleFP8
from ...fp8.scheme.observed import FIELDS, measure, observed_sets
from ...recipe import DelayedScaling, Recipe
from ..from_torch import convert_layer
from .calls import LayerCall, tensors_of

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_WARM_UP = 4  # the second call of a layer records its program, which later ones run
_ROUND_SECONDS = 5e-3
_MOST_CALLS = 50


class RoleStatistics(NamedTuple):
    """Statistics of a layer's tensors of one role, such as its weights.

    Attributes:
        amax: largest absolute value of the finite elements.
        sqnr: ``10 log10(sum x^2 / sum (x - FP8 of x)^2)`` in dB, the lowest of the layer's GEMMs;
            infinite if nothing is lost.
        underflow: fraction of the non-zero elements that become zero in FP8.
        saturated: fraction of the elements beyond FP8's largest value.
        nonfinite: number of NaN and infinite elements.
    """

    amax: float
    sqnr: float
    underflow: float
    saturated: float
    nonfinite: int


class Times(NamedTuple):
    """Median milliseconds of a layer's forward, and of its backward if it has one.

    Attributes:
        high: in the precision of the model.
        fp8: in FP8.
        backward: True if the backward is included.
    """

    high: float
    fp8: float
    backward: bool


def has_fp8(module: nn.Module) -> bool:
    """Returns True if ``module`` itself is an apex_te module that computes in FP8."""
    return isinstance(vars(module).get("_fp8"), ModuleFP8)


class Runner:
    """Repeats one call of a layer, forward and backward, with copies of its arguments."""

    def __init__(
        self, layer: nn.Module, call: LayerCall, recipe: Recipe | None, grad: bool = False
    ) -> None:
        self.layer, self.call, self.recipe = layer, call, recipe
        self.args, self.kwargs = _detached(call.args), _detached(call.kwargs)
        inputs = [*tensors_of(self.args), *tensors_of(self.kwargs)]
        self.leaves = [tensor for tensor in inputs if tensor.requires_grad]
        self.leaves += [p for p in layer.parameters() if p.requires_grad]
        self.device = next((t.device for t in [*inputs, *layer.parameters()]), torch.device("cpu"))
        self.grad = grad or self.has_backward

    @property
    def has_backward(self) -> bool:
        """True if the call's output has a gradient and something requires one."""
        return bool(self.leaves and self.call.gradients)

    def __call__(self) -> None:
        with contextlib.ExitStack() as stack:
            if self.call.autocast is not None:
                stack.enter_context(torch.autocast(self.device.type, self.call.autocast))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            stack.enter_context(
                fp8_autocast(enabled=self.recipe is not None, fp8_recipe=self.recipe)
            )
            outputs = tensors_of(self.layer(*self.args, **self.kwargs))
        if self.has_backward:
            pairs = [(outputs[i], g.to(outputs[i].dtype)) for i, g in self.call.gradients.items()]
            results, gradients = zip(*pairs, strict=True)
            torch.autograd.grad(results, self.leaves, gradients, allow_unused=True)


def _detached(value: Any) -> Any:
    """Returns a copy of nested arguments with tensors cut from their graph."""
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: _detached(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_detached(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _twins(layer: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Returns a copy of a layer in bf16 or fp32, and one that computes in FP8 in a region."""
    plain = copy.deepcopy(layer)
    for module in plain.modules():
        for name in _HOOKS:
            getattr(module, name).clear()
        if has_fp8(module):  # without the scales of earlier training
            trained: Any = module
            trained._fp8 = ModuleFP8(trained._fp8.state.gemms, module)
    if any(map(has_fp8, plain.modules())):
        return plain, plain
    converted = copy.deepcopy(plain)
    convert_layer(converted)
    return plain, converted


def _alone(recipe: Recipe) -> Recipe:
    """Returns a recipe whose scales are those of the tensors themselves, on this rank."""
    if isinstance(recipe, DelayedScaling):
        return dataclasses.replace(recipe, reduce_amax=False, first_step="current")
    return recipe


def observe(layer: nn.Module, call: LayerCall, recipe: Recipe) -> dict[str, RoleStatistics]:
    """Returns the statistics of a layer's tensors in one step in FP8, by role."""
    found: dict[str, list[torch.Tensor]] = {}

    def note(gemm: int, role: str, x: Any, quantized: Any, quantizer: Any) -> None:
        measured = measure(x, quantized, quantizer)
        if measured is not None:
            loss = _signal_and_noise(x, quantizer.dequantize(quantized))
            found.setdefault(role, []).append(torch.cat([measured, loss]))

    twin = _twins(layer)[1]
    for module in twin.modules():
        if has_fp8(module):
            member: Any = module._fp8
            member.observe(lambda sets: observed_sets(sets, note))
    Runner(twin, call, _alone(recipe), grad=True)()
    return {role: _summed(torch.stack(parts).cpu()) for role, parts in found.items()}


def _signal_and_noise(x: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
    """Returns sums of squares of ``x`` and its FP8 error, float64 ``[2]``; only finite elements."""
    values = x.detach().float()
    decoded = decoded[: values.shape[0], : values.shape[1]]
    finite = torch.isfinite(values) & torch.isfinite(decoded)
    loss = (values - decoded).masked_fill(~finite, 0.0)
    values = values.masked_fill(~finite, 0.0)
    return torch.stack([part.square().sum(dtype=torch.float64) for part in (values, loss)])


def _summed(parts: torch.Tensor) -> RoleStatistics:
    """Returns the statistics of a role from the measurements of its tensors, ``[tensors, ...]``."""
    totals = dict(zip(FIELDS, parts.sum(0).tolist(), strict=False))
    signal, noise = parts[:, -2], parts[:, -1]
    sqnr = 10 * torch.log10(signal / noise)
    sqnr = sqnr.masked_fill((noise == 0) | (signal == 0), float("inf"))
    return RoleStatistics(
        amax=parts[:, FIELDS.index("amax")].amax().item(),
        sqnr=sqnr.amin().item(),
        underflow=totals["underflowed"] / max(totals["nonzero"], 1.0),
        saturated=totals["saturated"] / max(totals["elements"], 1.0),
        nonfinite=int(totals["nonfinite"]),
    )


def measure_times(layer: nn.Module, call: LayerCall, recipe: Recipe, repeats: int) -> Times:
    """Measures a layer's call alternately in bf16 or fp32 and in FP8, on the layer's device."""
    plain, converted = _twins(layer)
    runners = Runner(plain, call, None), Runner(converted, call, _alone(recipe))
    high, fp8 = _milliseconds(runners, runners[0].device, repeats)
    return Times(high, fp8, runners[0].has_backward)


def _milliseconds(
    runs: Sequence[Callable[[], None]], device: torch.device, repeats: int
) -> list[float]:
    """Returns the median time of each function, in milliseconds, run in turns after a warm-up."""
    counts = []
    for run in runs:
        for _ in range(_WARM_UP):
            run()
        with _timed(device) as once:
            run()
        counts.append(max(1, min(_MOST_CALLS, int(_ROUND_SECONDS * 1e3 / max(once(), 1e-3)))))
    rounds: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, count, times in zip(runs, counts, rounds, strict=True):
            with _timed(device) as taken:
                for _ in range(count):
                    run()
            times.append(taken() / count)
    return [statistics.median(times) for times in rounds]


@contextlib.contextmanager
def _timed(device: torch.device) -> Iterator[Callable[[], float]]:
    """Times a ``with`` block, and gives a function that returns its milliseconds afterwards."""
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        stream = torch.cuda.current_stream(device)

        def elapsed() -> float:
            events[1].synchronize()
            return events[0].elapsed_time(events[1])

        torch.cuda.synchronize(device)
        events[0].record(stream)
        yield elapsed
        events[1].record(stream)
    else:
        ends: list[float] = []
        start = time.perf_counter()
        yield lambda: (ends[0] - start) * 1e3
        ends.append(time.perf_counter())
