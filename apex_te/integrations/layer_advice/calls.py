"""Recording of a model's layer calls while a sample runs: arguments and gradients of outputs."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...fp8.autocast import fp8_autocast, is_fp8_enabled


@dataclasses.dataclass
class LayerCall:
    """First call of a layer in a forward of the sample; its tensors are those of the model's graph.

    ``gradients`` maps the index of an output tensor in ``tensors_of(output)`` to its gradient.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: torch.dtype | None
    gradients: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    count: int = 1


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in nested mappings, sequences and dataclasses, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        parts: Any = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        return []
    return [tensor for part in parts for tensor in tensors_of(part)]


def record_calls(model: nn.Module, sample: Any, layers: dict[str, nn.Module]) -> dict[str, Any]:
    """Runs forward and backward of a model with a sample, and records the calls of layers that ran.

    Parameters, their gradients and buffers are unchanged afterwards. Hooks of parameters do not
    run. If nothing requires a gradient, only the forward runs.
    """
    calls: dict[str, LayerCall] = {}
    handles = []
    try:
        for name, layer in layers.items():
            handles.append(
                layer.register_forward_hook(_recorder(calls, name), with_kwargs=True, prepend=True)
            )
        with _restored_buffers(model), torch.enable_grad(), fp8_autocast(enabled=False):
            loss = _loss(_run(model, sample))
            for handle in handles:  # before a recompute calls the layers again
                handle.remove()
            leaves = [p for p in model.parameters() if p.requires_grad]
            if loss.requires_grad and leaves:
                _backward(loss, leaves)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _recorder(calls: dict[str, LayerCall], name: str) -> Callable[..., None]:
    """Returns the forward hook that records the calls of a layer."""

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if is_fp8_enabled():
            raise ValueError(
                "advise: sample must run the model outside of fp8_autocast, got a call of"
                f" {name or type(module).__name__} inside of it"
            )
        if name in calls:
            calls[name].count += 1
            return
        outputs = tensors_of(output)
        kind = next((t.device.type for t in outputs), "cpu")
        enabled = torch.is_autocast_enabled(kind)
        call = LayerCall(args, kwargs, torch.get_autocast_dtype(kind) if enabled else None)
        calls[name] = call
        for index, tensor in enumerate(outputs):
            if tensor.requires_grad:
                tensor.register_hook(_keeper(call, index))

    return hook


def _keeper(call: LayerCall, index: int) -> Callable[[torch.Tensor], None]:
    """Returns the tensor hook that keeps the gradient of one of a call's outputs."""

    def hook(gradient: torch.Tensor) -> None:
        call.gradients[index] = gradient.detach()

    return hook


def _run(model: nn.Module, sample: Any) -> Any:
    """Returns what the model gives for the sample."""
    if isinstance(sample, Mapping):
        return model(**sample)
    if isinstance(sample, (tuple, list)):
        return model(*sample)
    if isinstance(sample, torch.Tensor):
        return model(sample)
    return sample(model)


def _loss(output: Any) -> torch.Tensor:
    """Returns an output's ``loss``, or itself if it is one number, or the sum of mean squares."""
    given = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(given, torch.Tensor) and given.numel() == 1:
        return given.sum()
    found = [tensor for tensor in tensors_of(output) if tensor.is_floating_point()]
    if not found:
        raise ValueError(
            "advise: sample must make the model return floating-point tensors, got"
            f" {type(output).__name__}"
        )
    if len(found) == 1 and found[0].numel() == 1:
        return found[0].sum()
    parts = [tensor.float().square().mean() for tensor in found if tensor.requires_grad]
    return torch.stack(parts).sum() if parts else found[0].detach().float().sum()


def _backward(loss: torch.Tensor, leaves: list[nn.Parameter]) -> None:
    """Computes gradients, which the hooks of the recorded outputs see, and drops them."""
    try:
        torch.autograd.grad(loss, leaves, allow_unused=True)
    except RuntimeError as error:
        if "heckpoint" not in str(error):
            raise
        raise NotImplementedError(
            "advise: model must use checkpointing with use_reentrant=False, or none, got reentrant"
            " checkpointing"
        ) from error


@contextlib.contextmanager
def _restored_buffers(model: nn.Module) -> Iterator[None]:
    """Restores buffers, their values and which there are, at the end of a ``with`` block."""
    places = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    values = [
        (buffer, buffer.detach().clone())
        for _, buffers in places
        for buffer in buffers.values()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in values:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
        for place, buffers in places:
            place.clear()
            place.update(buffers)


@contextlib.contextmanager
def restored_random_states(model: nn.Module) -> Iterator[None]:
    """Restores random states, also those of the model's trackers, after a ``with`` block."""
    trackers = {}
    for module in model.modules():
        get: Any = getattr(module, "get_rng_state_tracker", None)
        tracker: Any = get() if callable(get) else None
        if hasattr(tracker, "get_states") and hasattr(tracker, "set_states"):
            trackers[id(tracker)] = tracker, tracker.get_states()
    python, cpu = random.getstate(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    numpy = sys.modules.get("numpy")
    numpys = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        for tracker, states in trackers.values():
            tracker.set_states(states)
        random.setstate(python)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        if numpy is not None:
            numpy.random.set_state(numpys)
