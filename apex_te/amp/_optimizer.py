"""Preparation of an optimizer for amp: master weights, hooks, and a step that can be skipped."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ..optimizers._base import FusedOptimizer
from ..optimizers._bucket import MASTER, has_master, needs_copy, new_master
from ._grads import Flags, Pair, move_grads


class OptimizerAmp:
    """State that amp keeps for one optimizer, in the optimizer's attribute ``_amp``.

    Attributes:
        pairs: ``(parameter, master)`` for each master weight that replaces a parameter in
            ``param_groups``; empty for apex_te's optimizers, which keep master weights themselves.
        scaled: True if gradients are still scaled, after ``scale_loss(delay_unscale=True)``.
        drops_grads: True if each step drops the gradients of master weights, also one that is
            skipped, for programs that call ``zero_grad`` of the model only.
        skips_on_device: True if ``step`` reads ``found_inf`` on the device; else the host reads it
            and skips the step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, master_weights: bool) -> None:
        self.skips_on_device = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self.pairs: list[Pair] = []
        self._replaces = master_weights and not isinstance(optimizer, FusedOptimizer)
        self.scaled = False
        self.drops_grads = False
        # Of each pair: None, or the parameter's version at which its master was made of it.
        self._versions: list[int | None] | None = None
        # While a state dict is loaded: its master weights, each with the pair it belongs to.
        self.loading: list[tuple[torch.Tensor, Pair]] = []
        if isinstance(optimizer, FusedOptimizer):
            optimizer.renew()
            if master_weights:
                optimizer.enable_master_weights()
        else:
            self.replace_params(optimizer, optimizer.param_groups)
            if optimizer.state:  # moments take the dtype of the parameters, as torch has them
                optimizer.load_state_dict(optimizer.state_dict())
        self.handles = [
            optimizer.register_step_pre_hook(_before_step),
            optimizer.register_step_post_hook(_after_step),
        ]
        if self._replaces:
            self.handles += [
                optimizer.register_state_dict_post_hook(_add_masters),
                optimizer.register_load_state_dict_pre_hook(_take_masters),
                optimizer.register_load_state_dict_post_hook(_set_masters),
            ]

    def split(self, optimizer: torch.optim.Optimizer) -> tuple[list[Pair], list[torch.Tensor]]:
        """Returns pairs ``(parameter, master)``, and the parameters without a master weight."""
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
        """Copies parameters to their master weights, once, if they changed after these were made.

        Thus weights may be loaded before the first step. Loading a state dict without master
        weights makes the next call copy again.
        """
        if self._versions is None:
            return
        with torch.no_grad():
            for (param, master), version in zip(self.pairs, self._versions, strict=True):
                if version is not None and param._version != version:
                    master.copy_(param.detach())
        self._versions = None

    def loaded(self) -> list[int]:
        """Restores saved master weights and their parameters; ``refresh`` sets the others."""
        masters, self.loading = self.loading, []
        with torch.no_grad():
            for saved, (param, master) in masters:
                master.copy_(saved)
                param.copy_(master)
        given = {id(master) for _, (_, master) in masters}
        missing = [i for i, (_, master) in enumerate(self.pairs) if id(master) not in given]
        self._versions = None
        if missing:
            self._versions = [None if id(master) in given else -1 for _, master in self.pairs]
        return missing

    def replace_params(
        self, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]
    ) -> None:
        """Replaces parameters that need master weights by new ones, with their optimizer state."""
        if not self._replaces:
            return
        before = len(self.pairs)
        for group in groups:
            for i, param in enumerate(group["params"]):
                if not has_master(param):
                    continue
                master = torch.nn.Parameter(new_master(param), requires_grad=param.requires_grad)
                group["params"][i] = master
                self.pairs.append((param, master))
                if param in optimizer.state:
                    optimizer.state[master] = optimizer.state.pop(param)
        known = [None] * before if self._versions is None else self._versions
        self._versions = [*known, *(param._version for param, _ in self.pairs[before:])]

    def restore_params(self, optimizer: torch.optim.Optimizer) -> None:
        """Puts the parameters, with their master weights' state, back into ``param_groups``."""
        params = {id(master): param for param, master in self.pairs}
        for group in optimizer.param_groups:
            for i, master in enumerate(group["params"]):
                param = params.get(id(master))
                if param is not None:
                    group["params"][i] = param
                    if master in optimizer.state:
                        optimizer.state[param] = optimizer.state.pop(master)


def amp_of(optimizer: torch.optim.Optimizer) -> OptimizerAmp | None:
    """Returns amp's state of ``optimizer``; None if ``amp.initialize`` has not prepared it."""
    return optimizer.__dict__.get("_amp")


def prepare_optimizer(optimizer: torch.optim.Optimizer, master_weights: bool) -> None:
    """Makes ``optimizer`` work with ``scale_loss``: hooks, wrapped methods, master weights."""
    release_optimizer(optimizer)
    kept = OptimizerAmp(optimizer, master_weights)
    optimizer._amp = kept  # type: ignore[attr-defined]
    if not kept.skips_on_device:
        _wrap(optimizer, "step", _step)
    _wrap(optimizer, "zero_grad", _zero_grad)
    _wrap(optimizer, "add_param_group", _add_param_group)


def release_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Undoes ``prepare_optimizer``, except for the master weights of apex_te's optimizers."""
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
    """Replaces a method on the instance, unless an earlier call has done so."""
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
    """Calls the optimizer's ``step`` unless the flag is set, for which the host waits."""
    # torch's optimizers refuse a flag that they cannot use.
    found_inf = self.__dict__.pop("found_inf", None) if amp_of(self) is not None else None
    if found_inf is not None:
        if args or kwargs.get("closure") is not None:
            raise RuntimeError("amp: step must be without a closure after scale_loss, got one")
        if found_inf.item():
            _drop_grads(self)
            return None
    return inner(*args, **kwargs)


def _zero_grad(self: Any, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Calls the optimizer's own ``zero_grad``, and drops flags and gradients that amp keeps."""
    inner(*args, **kwargs)
    kept = amp_of(self)
    if kept is not None:
        kept.scaled = False
        _forget_flags(self)
        for param, _ in kept.pairs:
            param.grad = None


def _add_param_group(
    self: Any, inner: Callable[..., Any], param_group: dict[str, Any], *args: Any, **kwargs: Any
) -> None:
    """Calls ``inner``, the optimizer's own ``add_param_group``, and makes master weights."""
    groups = len(self.param_groups)
    inner(param_group, *args, **kwargs)
    kept = amp_of(self)
    if kept is None or len(self.param_groups) == groups:
        return
    known = {id(param) for param, _ in kept.pairs}
    if any(id(param) in known for param in self.param_groups[-1]["params"]):
        self.param_groups.pop()
        raise ValueError(
            "amp: param_group must have parameters that are in no other group of the optimizer, "
            "got one whose master weight is in another group"
        )
    kept.replace_params(self, self.param_groups[-1:])


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Moves gradients of a backward outside ``scale_loss`` to master weights (a step pre-hook)."""
    kept = amp_of(optimizer)
    assert kept is not None
    if kept.scaled:
        raise RuntimeError(
            "amp: step must follow a scale_loss with delay_unscale=False, got scaled gradients"
        )
    if kept.pairs:
        kept.refresh()
        move_grads(kept.pairs, Flags(None))


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Removes the step's flags and copies master weights to parameters (a step post-hook)."""
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
    _drop_grads(optimizer)


def _drop_grads(optimizer: torch.optim.Optimizer) -> None:
    """Drops the gradients of master weights, if ``drops_grads`` asks for it."""
    kept = amp_of(optimizer)
    if kept is not None and kept.drops_grads:
        for _, master in kept.split(optimizer)[0]:
            master.grad = None


def _forget_flags(optimizer: torch.optim.Optimizer) -> None:
    """Removes the attributes that tell ``step`` to skip or unscale."""
    for name in ("found_inf", "grad_scale"):
        optimizer.__dict__.pop(name, None)


def _index(optimizer: torch.optim.Optimizer) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Returns the parameters with master weights, and their numbers in the state dict."""
    kept = amp_of(optimizer)
    places = {id(param): i for i, param in enumerate(_params(optimizer))}
    pairs = kept.pairs if kept is not None else []
    return [(places[id(master)], param, master) for param, master in pairs]


def _add_masters(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns a state dict with the master weights added as ``master_param`` (a post-hook)."""
    states = dict(state_dict["state"])
    for i, _, master in _index(optimizer):
        states[i] = {**states.get(i, {}), MASTER: master.detach()}
    return {**state_dict, "state": states}


def _take_masters(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Takes the master weights out of a state dict, for ``_set_masters`` (a pre-hook)."""
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
        kept.loading = found
    return {**state_dict, "state": states}


def _set_masters(optimizer: torch.optim.Optimizer) -> None:
    """Sets master weights after loading (a post-hook); warns if some, but not all, were saved."""
    kept = amp_of(optimizer)
    missing = kept.loaded() if kept is not None else []
    if kept is None or not 0 < len(missing) < len(kept.pairs):
        return
    index = _index(optimizer)
    numbers = ", ".join(str(index[i][0]) for i in missing)
    warnings.warn(
        f"amp: the state dict of {type(optimizer).__name__} has no {MASTER} for parameters "
        f"{numbers}; the next step makes these master weights from the parameters",
        stacklevel=2,
    )
