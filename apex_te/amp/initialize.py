"""``amp.initialize``, which prepares models and optimizers for mixed precision by an opt level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..runtime.named_arguments import check_flags, check_ints, named_arguments
from ._model import prepare_model, release_model
from ._optimizer import prepare_optimizer, release_optimizer
from .levels import Properties, choose, describe
from .loss import as_optimizers, state
from .scaler import LossScaler

__all__ = ["initialize"]


@named_arguments("amp.initialize")
def initialize(
    models: torch.nn.Module | Sequence[torch.nn.Module],
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    hysteresis: int = 1,
) -> Any:
    """Prepares models and optimizers, in place, for mixed precision by an opt level.

    Call it once, with the models on their device: before wrapping them in DDP and before loading a
    checkpoint, but after ``fully_shard`` and after the optimizers were given the sharded
    parameters. A second call undoes the first, except that weights keep their dtypes unless the new
    level casts them.

    ``opt_level`` sets the properties from ``cast_model_type`` to ``cast_model_outputs``, and the
    FP8 recipe; ``apex_te/amp/levels.py`` has the table. An argument that is not None replaces the
    level's.

    Args:
        models: a module or a list of modules.
        optimizers: an optimizer, a list of optimizers, or None.
        enabled: False undoes an earlier call and prepares nothing; ``scale_loss`` then yields the
            unscaled loss.
        opt_level: "O0" to "O7".
        cast_model_type: dtype to which parameters, buffers and inputs are cast.
        patch_torch_functions: run the forward under ``torch.autocast``; False turns off the
            autocast of O1 and O4, True is an error with any other level.
        keep_batchnorm_fp32: batch norms keep float32 parameters and buffers; the strings "True" and
            "False" are accepted.
        master_weights: the optimizers update float32 copies of 16-bit parameters. apex_te's
            optimizers keep the copies in their state; in any other optimizer the copies replace the
            parameters in ``param_groups``. State dicts have them as ``master_param`` in either
            case.
        loss_scale: "dynamic" or a number, which may be a string.
        cast_model_outputs: dtype of floating-point outputs. None stands for float32 if
            ``cast_model_type`` is set, and otherwise leaves outputs as they are.
        num_losses: number of loss scalers, chosen by ``scale_loss(loss_id=...)``.
        verbosity: 1 prints the chosen properties on the first rank, 0 nothing.
        min_loss_scale: floor of a dynamic scale; None is 2**-24.
        max_loss_scale: cap of a dynamic scale.
        hysteresis: number of successive steps with non-finite gradients from which on each one
            halves a dynamic scale.

    Returns:
        ``models``, or ``(models, optimizers)`` if optimizers are given: the objects that were
        passed; models that came in a list or tuple are in a list.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a value is out of range, or arguments exclude each other.
    """
    all_models = _as_models(models)
    all_optimizers = [] if optimizers is None else as_optimizers("amp.initialize", optimizers)
    check_ints("amp.initialize", num_losses=num_losses)
    check_ints("amp.initialize", 0, verbosity=verbosity)
    check_flags("amp.initialize", enabled=enabled)
    overrides = {
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
        "cast_model_outputs": cast_model_outputs,
    }
    chosen = choose(opt_level, overrides)
    scalers = [
        LossScaler(
            chosen.loss_scale,
            min_loss_scale=min_loss_scale,
            max_loss_scale=max_loss_scale,
            hysteresis=hysteresis,
        )
        for _ in range(num_losses)
    ]
    result: Any = models
    if enabled:
        _check_params(all_models, opt_level, chosen)
        if verbosity and _is_first_rank():
            print(describe(opt_level, chosen))
    for optimizer in all_optimizers:
        release_optimizer(optimizer)
    if enabled:
        prepared = [prepare_model(model, chosen) for model in all_models]
        result = prepared if isinstance(models, (list, tuple)) else prepared[0]
        for optimizer in all_optimizers:
            prepare_optimizer(optimizer, bool(chosen.master_weights))
    else:
        for model in all_models:
            release_model(model)
    state.scalers = scalers if enabled else []
    return result if optimizers is None else (result, optimizers)


def _as_models(models: Any) -> list[torch.nn.Module]:
    """Returns a list of one or several models."""
    many = list(models) if isinstance(models, (list, tuple)) else [models]
    for model in many:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"amp.initialize: models must be torch.nn.Module objects, got "
                f"{type(model).__name__}"
            )
        wrappers = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
        # apex's has the name of torch's.
        if isinstance(model, wrappers) or type(model).__name__ == "DistributedDataParallel":
            raise ValueError(
                "amp.initialize: models must be wrapped for data parallelism afterwards, got "
                f"{type(model).__name__}"
            )
    return many


def _check_params(models: list[torch.nn.Module], opt_level: str, chosen: Properties) -> None:
    """Raises ValueError if a model that the level does not cast has 16-bit parameters."""
    if chosen.cast_model_type is not None:
        return
    for model in models:
        for name, param in model.named_parameters():
            if param.dtype in (torch.float16, torch.bfloat16):
                raise ValueError(
                    f"amp.initialize: parameters must be float32 with opt_level {opt_level}, got "
                    f"{param.dtype} for {name}"
                )


def _is_first_rank() -> bool:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return True
    return distributed.get_rank() == 0
