"""``advise``, which tries a model's layers in FP8 and says which of them to convert."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...fp8.delayed.update import preserved_fp8_state
from ...recipe import Recipe, chosen_recipe
from ...runtime.named_arguments import check_ints, check_model, named_arguments
from .._selection import Selection
from ..experts import StackedExperts
from ..from_torch import feature_sizes, is_replaceable, reason_to_keep
from .advice import Advice, ExactName, LayerAdvice
from .calls import LayerCall, record_calls, restored_random_states, tensors_of
from .trial import RoleStatistics, Times, has_fp8, measure_times, observe

__all__ = ["Advice", "ExactName", "LayerAdvice", "RoleStatistics", "Times", "advise"]

_MULTIPLE = 16  # of sizes that FP8 GEMMs take without padding


@named_arguments()
def advise(
    model: nn.Module,
    sample: Any,
    recipe: Recipe | str | None = None,
    *,
    repeats: int = 10,
    min_gain: float | None = None,
    min_sqnr: float = 20.0,
    min_grad_sqnr: float = 15.0,
) -> Advice:
    """Runs each linear layer of a model in FP8, and reports the speedup and the loss of accuracy.

    The model runs once with ``sample``, forward and backward, in bf16 or fp32. Then a copy of each
    layer repeats its part of the run on its device. One step in FP8 gives the statistics of input,
    weight and output gradient. Timed steps alternate between bf16 or fp32 and FP8; layers of the
    same sizes are timed once. This covers the layers that ``from_torch`` converts, and those of
    apex_te. An apex_te layer that contains several, such as ``TransformerLayer``, is tried as one.

    The model, its gradients, buffers and FP8 state, and random states are unchanged afterwards. The
    times are those of eager calls, without the model's other work at the same time. Delayed scaling
    is tried with scales from the tensors of the run. If a layer gets no gradient, as with frozen
    weights, only the forward is timed.

    Args:
        model: model of torch or Hugging Face, before or after ``from_torch``, on one device and not
            sharded.
        sample: arguments of the model: a tensor, tuple, list or dict; or a function ``model ->
            output``, which may use ``torch.autocast`` and compute the loss. The loss is the
            output's ``loss``, the output if it is one number, or else the mean of its squares.
        recipe: FP8 recipe or its name; None is ``DelayedScaling()``.
        repeats: timed rounds for each size of layers; the median counts.
        min_gain: advise against FP8 for a layer if its time in bf16 or fp32, divided by its time in
            FP8, is below this. None is 1.0 on a GPU; on a CPU, which emulates FP8, None ignores
            times.
        min_sqnr: advise against FP8 if the SQNR of input or weight is below this, in dB.
        min_grad_sqnr: advise against FP8 if the SQNR of the output's gradient is below this, in dB.

    Returns:
        The ``Advice``: ``print`` it for the table, pass its ``exclude`` to ``from_torch``.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a number is out of range; the model has no layer to try, or has weights on the
            meta device; the sample enters ``fp8_autocast`` or produces no tensor.
        NotImplementedError: the model is sharded, or uses reentrant checkpointing.
    """
    least = 0.0 if min_gain is None else min_gain
    _check(model, sample, repeats, min_gain=least, min_sqnr=min_sqnr, min_grad=min_grad_sqnr)
    chosen = chosen_recipe("advise", "recipe", recipe)
    layers = _layers(model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    timed_by = min_gain is not None or device.type != "cpu"
    if min_gain is None and timed_by:
        least = 1.0
    if not layers:
        raise ValueError(
            "advise: model must have a linear layer that from_torch converts, or one of apex_te's,"
            f" got {type(model).__name__}"
        )
    tried = {name: layer for name, (layer, kept) in layers.items() if kept is None}
    limits = {"input": min_sqnr, "weight": min_sqnr, "grad_output": min_grad_sqnr}
    found = []
    with preserved_fp8_state(), restored_random_states(model), torch.enable_grad():
        calls = record_calls(model, sample, tried)
        timed: dict[Any, Times] = {}
        for name, (layer, kept) in layers.items():
            call = calls.pop(name, None)
            if call is None:
                found.append(_untried(name, layer, kept))
                continue
            roles = observe(layer, call, chosen)
            key = _signature(layer, call)
            if key not in timed:
                with torch.set_grad_enabled(bool(call.gradients)):
                    timed[key] = measure_times(layer, call, chosen, repeats)
            times = timed[key]
            against = _against(layer, times, roles, least, limits)
            plain = _untried(name, layer, kept)
            found.append(
                plain._replace(
                    rows=_rows(call), calls=call.count, times=times, roles=roles, against=against
                )
            )
    apart = any(not _is_ours(layer) for layer, kept in layers.values() if kept is None)
    return Advice(found, _brief(chosen), _device_name(device), timed_by, apart)


def _check(model: Any, sample: Any, repeats: Any, **limits: Any) -> None:
    """Checks the arguments of ``advise``."""
    check_model("advise", model)
    known = isinstance(sample, (torch.Tensor, tuple, list, Mapping))
    if not known and (not callable(sample) or isinstance(sample, nn.Module)):
        raise TypeError(
            "advise: sample must be a tensor, tuple, list, dict or function of the model,"
            f" got {type(sample).__name__}"
        )
    check_ints("advise", repeats=repeats)
    for name, value in limits.items():
        name = "min_grad_sqnr" if name == "min_grad" else name
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"advise: {name} must be a number, got {type(value).__name__}")
        if value != value:
            raise ValueError(f"advise: {name} must be a number, got {value}")
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise ValueError(f"advise: model must have its weights on a device, got {name} on meta")
        if type(parameter).__name__ == "DTensor" or type(parameter.data).__name__ == "DTensor":
            raise NotImplementedError(
                f"advise: model must not be sharded, got {name} as a DTensor; try it before"
            )


def _layers(model: nn.Module) -> dict[str, tuple[nn.Module, str | None]]:
    """Returns the layers that compute GEMMs, with the reason why ``from_torch`` keeps one."""
    selection = Selection(model, None, None, 0, 0, 0, 1)
    found: dict[str, tuple[nn.Module, str | None]] = {}
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(outer) for outer in inside):
            continue
        if _is_ours(module):
            found[name] = module, None
            inside.append(f"{name}." if name else "")
        elif is_replaceable(module) and (sizes := feature_sizes(module)):
            found[name] = module, reason_to_keep(module) or selection.reason(name, module, sizes)
    return found


def _is_ours(module: nn.Module) -> bool:
    """Returns True for a layer of apex_te that computes in FP8, as a whole or in its parts."""
    own = type(module).__module__.startswith("apex_te.module.") or has_fp8(module)
    return isinstance(module, StackedExperts) or (own and any(map(has_fp8, module.modules())))


def _untried(name: str, layer: Any, kept: str | None) -> LayerAdvice:
    """Returns the entry of a layer that did not run or that ``from_torch`` leaves."""
    inner, outer = feature_sizes(layer) or (
        getattr(layer, "in_features", 0) or getattr(layer, "hidden_size", 0),
        getattr(layer, "out_features", 0),
    )
    return LayerAdvice(name, type(layer).__name__, inner, outer, 0, 0, None, {}, (), kept)


def _rows(call: LayerCall) -> int:
    """Returns the number of rows of a call's first argument."""
    inputs = [*tensors_of(call.args), *tensors_of(call.kwargs)]
    return inputs[0].numel() // max(inputs[0].shape[-1], 1) if inputs and inputs[0].dim() else 0


def _signature(layer: nn.Module, call: LayerCall) -> Any:
    """Returns what the time of a call depends on: class, options, shapes, dtypes and gradients."""

    def form(tensor: torch.Tensor) -> tuple[Any, ...]:
        return tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad

    inputs = [*tensors_of(call.args), *tensors_of(call.kwargs)]
    return (
        type(layer),
        layer.extra_repr(),
        layer.training,
        call.autocast,
        tuple(call.gradients),
        tuple((name, form(p)) for name, p in layer.named_parameters()),
        tuple(form(tensor) for tensor in inputs),
    )


def _against(
    layer: nn.Module,
    times: Times,
    roles: dict[str, RoleStatistics],
    min_gain: float,
    limits: dict[str, float],
) -> tuple[str, ...]:
    """Returns reasons to keep a layer in bf16 or fp32; ``limits`` are least SQNR in dB by role."""
    reasons = []
    gain = times.high / times.fp8
    if gain < min_gain:
        reasons.append(f"{gain:.2f}x as fast in FP8")
    sizes = {size for p in layer.parameters() if p.dim() >= 2 for size in p.shape[-2:]}
    if odd := sorted(size for size in sizes if size % _MULTIPLE):
        reasons.append(f"a size of {odd[0]} is not a multiple of {_MULTIPLE}")
    for role, found in roles.items():
        if found.sqnr < limits[role]:
            reasons.append(f"SQNR of {role} {found.sqnr:.1f} dB is below {limits[role]:g}")
        if found.nonfinite:
            reasons.append(f"{found.nonfinite} NaN or infinite elements in {role}")
    return tuple(reasons)


def _brief(recipe: Recipe) -> str:
    """Returns the recipe's class and those of its settings that are not the defaults."""
    if not dataclasses.is_dataclass(recipe):
        return repr(recipe)
    changed = (
        f"{field.name}={getattr(recipe, field.name)!r}"
        for field in dataclasses.fields(recipe)
        if getattr(recipe, field.name) != field.default
    )
    return f"{type(recipe).__name__}({', '.join(changed)})"


def _device_name(device: torch.device) -> str:
    """Returns a name of ``device``."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({os.uname().machine}, {torch.get_num_threads()} threads)"
