"""Preparation of an optimizer: master weights that it lacks, hooks, a step that may be skipped."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from ..optimizers._base import FusedOptimizer
from ..optimizers._bucket import MASTER, has_master, needs_copy, new_master
from ._grads import Flags, Pair, move_grads

__all__ = ["OptimizerAmp", "amp_of", "prepare_optimizer", "release_optimizer"]


class OptimizerAmp:
    """amp's part of an optimizer, which holds it as ``_amp``.

    Attributes:
        pairs: ``(parameter, master)`` of an optimizer that has no masters of its own; the masters
            stand in its ``param_groups``.
        scaled: True if the gradients in place are scaled (``delay_unscale``).
        skips_on_device: True if the optimizer reads ``found_inf`` on the device; the steps of any
            other one are skipped by the host.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, master_weights: bool) -> None:
        self.skips_on_device = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self.pairs: list[Pair] = []
        self.scaled = False
        self._versions: list[int] | None = None
        self._loading: list[tuple[torch.Tensor, Pair]] = []  # masters of a load under way
        if isinstance(optimizer, FusedOptimizer):
            optimizer.renew()
            if master_weights:
                optimizer.enable_master_weights()
        else:
            if master_weights:
                self._replace_params(optimizer)
            if optimizer.state:  # moments take the dtype of the parameters, as torch has them
                optimizer.load_state_dict(optimizer.state_dict())
        self.handles = [
            optimizer.register_step_pre_hook(_before_step),
            optimizer.register_step_post_hook(_after_step),
        ]
        if self.pairs:
            self.handles += [
                optimizer.register_state_dict_post_hook(_add_masters),
                optimizer.register_load_state_dict_pre_hook(_take_masters),
                optimizer.register_load_state_dict_post_hook(_set_masters),
            ]

    def split(self, optimizer: torch.optim.Optimizer) -> tuple[list[Pair], list[torch.Tensor]]:
        """Tells parameters with a master from those without.

        Returns:
            ``(pairs, own)``: ``(parameter, master)`` where gradients go to a master; parameters
            that keep their gradients.
        """
        if isinstance(optimizer, FusedOptimizer):
            pairs, own = [], []
            for param in _params(optimizer):
                master = optimizer.master_weight(param)
                if master is None:
                    own.append(param)
                else:
                    pairs.append((param, master))
            return pairs, own
        masters = {id(master) for _, master in self.pairs}
        return self.pairs, [p for p in _params(optimizer) if id(p) not in masters]

    def refresh(self) -> None:
        """Renews masters of parameters that were loaded after the masters were made."""
        if self._versions is None:
            return
        with torch.no_grad():
            for (param, master), version in zip(self.pairs, self._versions, strict=True):
                if param._version != version:
                    master.copy_(param.detach())
        self._versions = None

    def load_later(self, masters: list[tuple[torch.Tensor, Pair]]) -> None:
        """Keeps masters that were saved until everything else is loaded."""
        self._loading = masters

    def loaded(self) -> None:
        """Sets loaded masters; unless all were saved, they are renewed from parameters."""
        masters, self._loading = self._loading, []
        with torch.no_grad():
            for saved, (param, master) in masters:
                master.copy_(saved)
                param.copy_(master)
        complete = len(masters) == len(self.pairs)
        self._versions = None if complete else [-1] * len(self.pairs)

    def _replace_params(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for i, param in enumerate(group["params"]):
                if not has_master(param):
                    continue
                master = torch.nn.Parameter(new_master(param), requires_grad=param.requires_grad)
                group["params"][i] = master
                self.pairs.append((param, master))
                if param in optimizer.state:
                    optimizer.state[master] = optimizer.state.pop(param)
        self._versions = [param._version for param, _ in self.pairs]

    def restore_params(self, optimizer: torch.optim.Optimizer) -> None:
        """Puts the parameters back in place of the masters."""
        params = {id(master): param for param, master in self.pairs}
        for group in optimizer.param_groups:
            for i, master in enumerate(group["params"]):
                param = params.get(id(master))
                if param is not None:
                    group["params"][i] = param
                    if master in optimizer.state:
                        optimizer.state[param] = optimizer.state.pop(master)


def amp_of(optimizer: torch.optim.Optimizer) -> OptimizerAmp | None:
    """Returns amp's part of ``optimizer``, None before ``initialize``."""
    return optimizer.__dict__.get("_amp")


def prepare_optimizer(optimizer: torch.optim.Optimizer, master_weights: bool) -> None:
    """Gives ``optimizer`` hooks and, where asked and missing, float32 master weights."""
    release_optimizer(optimizer)
    kept = OptimizerAmp(optimizer, master_weights)
    optimizer._amp = kept  # type: ignore[attr-defined]
    if not kept.skips_on_device:
        _wrap(optimizer, "step", _step)
    _wrap(optimizer, "zero_grad", _zero_grad)


def release_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Undoes ``prepare_optimizer``; a fused optimizer keeps its master weights."""
    kept = amp_of(optimizer)
    if kept is None:
        return
    for handle in kept.handles:
        handle.remove()
    kept.restore_params(optimizer)
    _forget_flags(optimizer)
    # The wrapped methods stay, for a scheduler may hold them: without _amp they only pass on.
    del optimizer._amp  # type: ignore[attr-defined]


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _wrap(optimizer: torch.optim.Optimizer, name: str, around: Callable[..., Any]) -> None:
    """Puts ``around(optimizer, inner, ...)`` in place of a bound method, once."""
    marker = f"_amp_wraps_{name}"
    if marker in optimizer.__dict__:
        return
    inner = getattr(optimizer, name)

    # A scheduler marks the function that it wrapped; the mark must stay visible.
    @functools.wraps(inner)
    def method(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return around(self, inner, *args, **kwargs)

    optimizer.__dict__[marker] = True
    setattr(optimizer, name, types.MethodType(method, optimizer))


def _step(self: Any, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Steps an optimizer that no flag on the device can skip: the host reads the flag."""
    # torch's optimizers refuse a flag that they cannot use.
    found_inf = self.__dict__.pop("found_inf", None) if amp_of(self) is not None else None
    if found_inf is not None:
        if args or kwargs.get("closure") is not None:
            raise RuntimeError("amp: step must be without a closure after scale_loss, got one")
        if found_inf.item():
            return None
    return inner(*args, **kwargs)


def _zero_grad(self: Any, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Zeroes gradients, drops those of parameters that have masters, and forgets flags."""
    inner(*args, **kwargs)
    kept = amp_of(self)
    if kept is not None:
        kept.scaled = False
        _forget_flags(self)
        for param, _ in kept.pairs:
            param.grad = None


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    kept = amp_of(optimizer)
    assert kept is not None
    if kept.scaled:
        raise RuntimeError(
            "amp: step must follow a scale_loss with delay_unscale=False, got scaled gradients"
        )
    if kept.pairs:
        kept.refresh()
        move_grads(kept.pairs, Flags(None))  # of a backward outside scale_loss


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _forget_flags(optimizer)
    kept = amp_of(optimizer)
    assert kept is not None
    if kept.pairs:
        with torch.no_grad():
            plain = [(m, p) for p, m in kept.pairs if not needs_copy(p)]
            Flags(None).scale([m.detach() for m, _ in plain], [p.detach() for _, p in plain])
            for param, master in kept.pairs:
                if needs_copy(param):
                    param.copy_(master)


def _forget_flags(optimizer: torch.optim.Optimizer) -> None:
    for name in ("found_inf", "grad_scale"):
        optimizer.__dict__.pop(name, None)


def _index(optimizer: torch.optim.Optimizer) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Returns a list of ``(position in a state dict, parameter, master)``."""
    kept = amp_of(optimizer)
    places = {id(param): i for i, param in enumerate(_params(optimizer))}
    pairs = kept.pairs if kept is not None else []
    return [(places[id(master)], param, master) for param, master in pairs]


def _add_masters(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    states = dict(state_dict["state"])
    for i, _, master in _index(optimizer):
        states[i] = {**states.get(i, {}), MASTER: master.detach()}
    return {**state_dict, "state": states}


def _take_masters(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    states = dict(state_dict["state"])
    found: list[tuple[torch.Tensor, Pair]] = []
    for i, param, master in _index(optimizer):
        values = dict(states.get(i, {}))
        saved = values.pop(MASTER, None)
        if values:
            states[i] = values
        else:
            states.pop(i, None)
        if saved is None:
            continue
        if not isinstance(saved, torch.Tensor) or saved.layout is not torch.strided:
            raise TypeError(f"amp: {MASTER} must be a dense tensor, got {type(saved).__name__}")
        if saved.shape != master.shape:
            raise ValueError(
                f"amp: {MASTER} must have shape {list(master.shape)}, got {list(saved.shape)}"
            )
        found.append((saved, (param, master)))
    kept = amp_of(optimizer)
    if kept is not None:
        kept.load_later(found)
    return {**state_dict, "state": states}


def _set_masters(optimizer: torch.optim.Optimizer) -> None:
    """Sets the masters once the optimizer's own state was accepted."""
    kept = amp_of(optimizer)
    if kept is not None:
        kept.loaded()
