"""``initialize`` with apex's arguments, and the state dict of the loss scalers."""

from __future__ import annotations

import dataclasses
import types
import weakref
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from .... import amp
from ....amp._optimizer import OptimizerAmp, amp_of
from ....amp.levels import LEVELS, choose
from ....amp.loss import state
from ....optimizers._base import FusedOptimizer
from ._amp_state import amp_state, inner_optimizer
from .handle import AmpHandle, NoOpHandle
from .scaler import LossScaler

load_state_dict = amp.load_state_dict
# Levels whose forwards run under autocast, by its dtype; another type chooses another of them.
_BY_TYPE = {LEVELS[name].autocast_type: name for name in ("O1", "O4")}


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | None = None,
    patch_torch_functions: bool | None = None,
    patch_torch_functions_type: torch.dtype | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Prepares models and optimizers for mixed precision by an opt level, O0 to O7.

    It is ``apex_te.amp.initialize``, whose documentation has the arguments, with these differences:
    models of O1 and O4 return float32 unless ``cast_model_outputs`` says otherwise, as apex
    computes losses in float32 there; each step drops the gradients of master weights; optimizers
    get apex's ``_amp_stash``; optimizers may be wrappers such as LARC.

    Args:
        patch_torch_functions_type: dtype of the autocast of O1 and O4; None is the level's.

    Returns:
        ``models``, or ``(models, optimizers)`` if optimizers are given.

    Raises:
        NotImplementedError: a wrapper has a fused optimizer, with master weights.
        TypeError: an argument has a wrong type.
        ValueError: a value is out of range, or arguments exclude each other.
    """
    level = LEVELS.get(opt_level) if isinstance(opt_level, str) else None
    if level is not None and level.patch_torch_functions:
        if patch_torch_functions_type is not None:
            if patch_torch_functions_type not in _BY_TYPE:
                raise ValueError(
                    "amp.initialize: patch_torch_functions_type must be torch.float16 or "
                    f"torch.bfloat16, got {patch_torch_functions_type}"
                )
            opt_level = _BY_TYPE[patch_torch_functions_type]
            loss_scale = level.loss_scale if loss_scale is None else loss_scale
        if patch_torch_functions is not False:
            cast_model_outputs = cast_model_outputs or torch.float32
    overrides: dict[str, Any] = {
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
        "cast_model_outputs": cast_model_outputs,
    }
    many = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    inner = [] if optimizers is None else [inner_optimizer(optimizer) for optimizer in many]
    chosen = choose(opt_level, overrides)
    for optimizer, wrapper in zip(inner, many, strict=False):
        if enabled and optimizer is not wrapper and isinstance(optimizer, FusedOptimizer):
            _check_wrapped(wrapper, opt_level, chosen.master_weights)
    prepared, _ = amp.initialize(
        models, inner, enabled, opt_level, num_losses=num_losses, verbosity=verbosity,
        min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale, **overrides,
    )  # fmt: skip
    if state.scalers:
        state.scalers[:] = [
            LossScaler(
                chosen.loss_scale, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale
            )
            for _ in range(num_losses)
        ]
    if amp_state.handle is not None:
        amp_state.handle.deactivate()
    amp_state.handle = NoOpHandle()
    if enabled and chosen.patch_torch_functions:
        amp_state.handle = AmpHandle(prepared if isinstance(prepared, list) else [prepared])
    values = {field.name: getattr(chosen, field.name) for field in dataclasses.fields(chosen)}
    amp_state.opt_properties = SimpleNamespace(enabled=enabled, opt_level=opt_level, **values)
    amp_state.verbosity = verbosity
    amp_state.min_loss_scale, amp_state.max_loss_scale = min_loss_scale, max_loss_scale
    amp_state.optimizers = [weakref.ref(optimizer) for optimizer in inner]
    for optimizer in inner:
        kept = amp_of(optimizer)
        if kept is not None:
            kept.drops_grads = True
            _add_stash(optimizer)
    return prepared if optimizers is None else (prepared, optimizers)


def _check_wrapped(wrapper: Any, opt_level: str, master_weights: bool | None) -> None:
    """Raises NotImplementedError if a wrapper would not see gradients, which masters have."""
    if master_weights:
        raise NotImplementedError(
            f"amp.initialize: optimizers must not have {type(wrapper).__name__} around a fused "
            f"optimizer with opt_level {opt_level}, whose master weights are not in param_groups; "
            "use an optimizer of torch.optim"
        )


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the state of every loss scaler, as numbers, in ``destination`` if it is given.

    Raises:
        RuntimeError: ``amp.initialize`` was not called.
    """
    destination = {} if destination is None else destination
    destination.update(amp.state_dict())
    return destination


class AmpStash:
    """View of an optimizer's parameters and master weights, in apex's attribute ``_amp_stash``."""

    lazy_init_called = True
    already_patched = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def _kept(self) -> OptimizerAmp:
        kept = amp_of(self._optimizer)
        if kept is None:
            raise RuntimeError("amp: the optimizer must be prepared by amp.initialize")
        return kept

    def _groups(self, choose: Any) -> list[list[torch.Tensor]]:
        """Returns for each parameter group what ``choose`` gives of its (parameter, master)."""
        masters = {
            id(each): pair for pair in self._kept().split(self._optimizer)[0] for each in pair
        }
        groups = []
        for group in self._optimizer.param_groups:
            found = [choose(*masters.get(id(p), (p, None))) for p in group["params"]]
            groups.append([each for each in found if each is not None])
        return groups

    @property
    def fp16_groups(self) -> list[list[torch.Tensor]]:
        """16-bit parameters by group."""
        return self._groups(lambda p, _: p if p.dtype.itemsize < 4 else None)

    @property
    def fp32_from_fp16_groups(self) -> list[list[torch.Tensor]]:
        """Master weights by group."""
        return self._groups(lambda _, master: master)

    @property
    def fp32_from_fp32_groups(self) -> list[list[torch.Tensor]]:
        """float32 parameters by group."""
        return self._groups(lambda p, _: p if p.dtype.itemsize >= 4 else None)

    @property
    def all_fp16_params(self) -> list[torch.Tensor]:
        """All 16-bit parameters."""
        return [p for group in self.fp16_groups for p in group]

    @property
    def all_fp32_from_fp16_params(self) -> list[torch.Tensor]:
        """All master weights."""
        return [p for group in self.fp32_from_fp16_groups for p in group]

    @property
    def all_fp32_from_fp32_params(self) -> list[torch.Tensor]:
        """All float32 parameters."""
        return [p for group in self.fp32_from_fp32_groups for p in group]

    all_fp32_params = all_fp32_from_fp32_params

    @property
    def params_have_scaled_gradients(self) -> bool:
        """True after ``scale_loss(delay_unscale=True)``."""
        return self._kept().scaled


def _add_stash(optimizer: Any) -> None:
    optimizer._amp_stash = AmpStash(optimizer)
    for name, function in _METHODS.items():
        setattr(optimizer, name, types.MethodType(function, optimizer))


def _make_masters(self: Any) -> None:
    """Makes master weights that are not there yet."""
    self._amp_stash.fp16_groups  # noqa: B018


def _masters_to_params(self: Any) -> None:
    """Copies master weights to their parameters."""
    kept = amp_of(self)
    with torch.no_grad():
        for param, master in kept.split(self)[0] if kept is not None else ():
            param.copy_(master)


def _refuse(self: Any, *args: Any) -> NoReturn:
    raise NotImplementedError("amp: use amp.scale_loss, which prepares and unscales gradients")


_METHODS = {
    "_amp_lazy_init": _make_masters,
    "_lazy_init_maybe_master_weights": _make_masters,
    "_master_params_to_model_params": _masters_to_params,
    "_prepare_amp_backward": _refuse,
    "_post_amp_backward": _refuse,
}
