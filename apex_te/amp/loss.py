"""``amp.scale_loss`` around a backward, state dicts of all loss scalers, and ``master_params``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..optimizers._base import FusedOptimizer
from ..runtime.named_arguments import named_arguments
from ._grads import Flags, move_grads, unscale_grads
from ._optimizer import OptimizerAmp, amp_of
from .scaler import LossScaler

__all__ = ["load_state_dict", "master_params", "scale_loss", "state_dict"]

_PREFIX = "loss_scaler"


class _State:
    """Global state of amp; ``scalers`` is None before ``amp.initialize``, empty if not enabled."""

    scalers: list[LossScaler] | None = None


state = _State()


@named_arguments("amp.scale_loss")
@contextlib.contextmanager
def scale_loss(
    loss: torch.Tensor,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    loss_id: int = 0,
    model: torch.nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[torch.Tensor]:
    """Context manager that scales the loss, and on exit unscales gradients and updates the scale.

    On exit, gradients are divided by the scale in float32 and added to those of earlier backwards:
    in the ``.grad`` of master weights if there are any, else in place. If a gradient is not finite,
    the next step of all ``optimizers`` is skipped. apex_te's optimizers and torch's with
    ``fused=True`` read the flag ``optimizer.found_inf`` on the device. In all other optimizers
    ``step`` waits for the device, and the host reads the flag. Ranks that hold parts of DTensor
    parameters, or of modules split over a ``tp_group``, share the flag and skip the same steps.

    Args:
        loss: a float tensor of one element.
        optimizers: all optimizers whose parameters get gradients from the loss.
        loss_id: number of the loss scaler to use, below ``num_losses`` of ``amp.initialize``.
        model: ignored, as in apex.
        delay_unscale: True leaves the gradients scaled. The next ``scale_loss`` with the same
            ``loss_id`` unscales them; it must come before the step.
        delay_overflow_check: True leaves the scale unchanged. The next ``scale_loss`` with the same
            ``loss_id`` updates it for the gradients of both.

    Yields:
        The tensor to call ``backward`` on: ``loss.float() * scale``, or ``loss`` after
        ``amp.initialize(enabled=False)``.

    Raises:
        RuntimeError: ``amp.initialize`` was not called, or did not get one of ``optimizers``.
        TypeError: an argument has a wrong type.
        ValueError: ``loss_id`` is unknown, or ``loss`` has several elements.
    """
    scaler, all_optimizers = _arguments(loss, optimizers, loss_id, model)
    if scaler is None:
        yield loss
        return
    kept: dict[int, torch.Tensor] = {}
    amps: list[tuple[torch.optim.Optimizer, OptimizerAmp]] = []
    for optimizer in all_optimizers:
        amp = amp_of(optimizer)
        if amp is None:
            raise RuntimeError("amp.scale_loss: optimizers must have gone through amp.initialize")
        amps.append((optimizer, amp))
    for optimizer, amp in amps:
        _enter(optimizer, amp, scaler, kept)
    try:
        yield scaler.scale(loss)
    except BaseException:
        for param in _params(all_optimizers):
            if id(param) in kept:
                param.grad = kept[id(param)]
        raise
    if delay_unscale:
        for _, amp in amps:
            amp.scaled = not scaler.is_one
        return
    flags = Flags(None if scaler.is_one else scaler.inv_scale())
    with torch.no_grad():
        for optimizer, amp in amps:
            _unscale(optimizer, amp, scaler, kept, flags)
        if scaler.dynamic:
            replaced = (param for _, amp in amps for param, _ in amp.pairs)
            found_inf = flags.combined(loss.device, (*_params(all_optimizers), *replaced))
            _report(scaler, all_optimizers, found_inf, delay_overflow_check)


def _params(optimizers: list[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    """Returns an iterator over all tensors in the ``param_groups`` of ``optimizers``."""
    return (p for o in optimizers for g in o.param_groups for p in g["params"])


def _enter(
    optimizer: torch.optim.Optimizer,
    amp: OptimizerAmp,
    scaler: LossScaler,
    kept: dict[int, torch.Tensor],
) -> None:
    """Sets gradients of earlier backwards aside, so that only new ones are unscaled on exit."""
    if amp.scaled or (scaler.is_one and not amp.pairs):
        return
    amp.refresh()
    pairs, own = amp.split(optimizer)
    move_grads(pairs, Flags(None))
    if scaler.is_one:
        return
    for param in own:
        if param.grad is not None:
            kept[id(param)] = param.grad
            param.grad = None


def _unscale(
    optimizer: torch.optim.Optimizer,
    amp: OptimizerAmp,
    scaler: LossScaler,
    kept: dict[int, torch.Tensor],
    flags: Flags,
) -> None:
    """Unscales the gradients of ``optimizer`` and adds the gradients that ``_enter`` set aside."""
    amp.scaled = False
    # Gradients that need no unscaling stay where they are: a fused optimizer reads them there.
    if scaler.is_one and not amp.pairs:
        return
    pairs, own = amp.split(optimizer)
    move_grads(pairs, flags)
    if not scaler.is_one:
        unscale_grads(own, kept, flags)


def _report(
    scaler: LossScaler,
    optimizers: list[torch.optim.Optimizer],
    found_inf: torch.Tensor,
    delayed: bool,
) -> None:
    """Hands the flag of non-finite gradients to the scaler, and to optimizers that skip a step."""
    for optimizer in optimizers:
        before = getattr(optimizer, "found_inf", None)
        total = found_inf if before is None else torch.maximum(before, found_inf)
        optimizer.found_inf = total  # type: ignore[attr-defined]
    if delayed:
        scaler.hold(found_inf)
    else:
        scaler.update(found_inf)


def _arguments(
    loss: Any, optimizers: Any, loss_id: Any, model: Any
) -> tuple[LossScaler | None, list[torch.optim.Optimizer]]:
    """Checks ``scale_loss``'s arguments; returns None and no optimizers if amp is not enabled."""
    if state.scalers is None:
        raise RuntimeError("amp.scale_loss: amp.initialize must be called before")
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"amp.scale_loss: loss must be a tensor, got {type(loss).__name__}")
    if not loss.is_floating_point():
        raise TypeError(f"amp.scale_loss: loss must be a floating-point tensor, got {loss.dtype}")
    if loss.numel() != 1:
        raise ValueError(
            "amp.scale_loss: loss must have one element, such as the mean, got shape "
            f"{list(loss.shape)}"
        )
    if model is not None and not isinstance(model, torch.nn.Module):
        raise TypeError(f"amp.scale_loss: model must be a Module, got {type(model).__name__}")
    if not state.scalers:  # initialize(enabled=False)
        return None, []
    if isinstance(loss_id, bool) or not isinstance(loss_id, int):
        raise TypeError(f"amp.scale_loss: loss_id must be an int, got {type(loss_id).__name__}")
    if not 0 <= loss_id < len(state.scalers):
        raise ValueError(
            f"amp.scale_loss: loss_id must be below num_losses {len(state.scalers)}, got {loss_id}"
        )
    return state.scalers[loss_id], as_optimizers("amp.scale_loss", optimizers)


def as_optimizers(caller: str, optimizers: Any) -> list[torch.optim.Optimizer]:
    """Returns a list of one or several optimizers."""
    many = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    for optimizer in many:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"{caller}: optimizers must be torch.optim.Optimizer objects, "
                f"got {type(optimizer).__name__}"
            )
    return many


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yields the tensors whose ``.grad`` the next step reads, for example to clip gradients.

    Yields:
        For each parameter, its master weight if it has one, unless only the parameter has a
        gradient; else the parameter.

    Raises:
        TypeError: ``optimizer`` is not a ``torch.optim.Optimizer``.
    """
    (one,) = as_optimizers("amp.master_params", optimizer)
    for group in one.param_groups:
        for param in group["params"]:
            master = one.master_weight(param) if isinstance(one, FusedOptimizer) else None
            if master is None or (master.grad is None and param.grad is not None):
                yield param
            else:
                yield master


def state_dict() -> dict[str, Any]:
    """Returns the state of every loss scaler, as numbers.

    Returns:
        ``{"loss_scaler0": {...}, ...}``, each value a ``LossScaler.state_dict()``.

    Raises:
        RuntimeError: ``amp.initialize`` was not called.
    """
    return {f"{_PREFIX}{i}": s.state_dict() for i, s in enumerate(_scalers("state_dict"))}


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Loads the state of the loss scalers, in order.

    If the number of scalers differs from the saved one, a message is printed, and as many as
    possible are loaded, from the first on. After an error all scalers are unchanged.

    Args:
        state_dict: result of ``amp.state_dict()``.

    Raises:
        RuntimeError: a key is unknown, a scaler's dict lacks a key, or ``amp.initialize`` was not
            called.
        TypeError: ``state_dict`` is not a dict, or a scaler's value is not a number.
        ValueError: a scale or count is out of range.
    """
    scalers = _scalers("load_state_dict")
    if not isinstance(state_dict, dict):
        raise TypeError(
            f"amp.load_state_dict: state_dict must be a dict, got {type(state_dict).__name__}"
        )
    unknown = [key for key in state_dict if _PREFIX not in key]
    if unknown:
        raise RuntimeError(
            f"amp.load_state_dict: state_dict has unexpected keys {', '.join(map(str, unknown))}"
        )
    if len(state_dict) != len(scalers):
        print(
            f"apex_te.amp: state_dict has {len(state_dict)} loss scalers, num_losses is "
            f"{len(scalers)}; the first {min(len(state_dict), len(scalers))} are loaded"
        )
    pairs = list(zip(scalers, state_dict.values(), strict=False))
    values = [scaler.checked(saved) for scaler, saved in pairs]
    for (scaler, _), found in zip(pairs, values, strict=True):
        scaler.take(found)


def _scalers(function: str) -> list[LossScaler]:
    """Returns all loss scalers, for the function of amp that is called ``function``."""
    if state.scalers is None:
        raise RuntimeError(f"amp.{function}: amp.initialize must be called before")
    return state.scalers
