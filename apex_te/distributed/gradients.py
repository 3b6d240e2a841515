"""Norm and overflow of the gradients of a model whose parameters several ranks hold parts of."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from ..comm.collectives import all_reduce, max_over_ranks
from ..comm.groups import check_process_group
from ..comm.shards import mesh_groups
from ..runtime.named_arguments import check_model, named_arguments
from .state_dict.split_model import groups_of_parts


@named_arguments()
def clip_grad_norm_(
    model: torch.nn.Module, max_norm: float, norm_type: float = 2.0, *, expert_group: Any = None
) -> torch.Tensor:
    """Clips the norm of all gradients of a model, as ``torch.nn.utils.clip_grad_norm_`` does.

    The norm is that of the whole model: parts of a parameter that is split over a ``tp_group`` or a
    DTensor's mesh, and parameters that several ranks hold in full, count once. Collective over the
    ranks of the model's ``tp_group``, of DTensors' meshes, and of ``expert_group``, which all get
    the same norm. The host does not wait for the device. Only ``.grad`` is read and scaled: call it
    after ``reduce_main_grads`` and similar functions have completed the gradients.

    Args:
        model: the model.
        max_norm: largest norm.
        norm_type: order of the norm, a positive float; ``math.inf`` is the largest absolute value.
        expert_group: process group over which experts' parameters, those with ``allreduce =
            False``, are distributed; None if every rank has all experts.

    Returns:
        The norm before clipping, an fp32 scalar on the device of the gradients.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: ``max_norm`` is negative or NaN, ``norm_type`` is not positive, or a module with
            a ``tp_size`` above 1 lacks ``tp_group``.
    """
    owner = "clip_grad_norm_"
    check_model(owner, model)
    check_process_group(owner, "expert_group", expert_group)
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{owner}: {name} must be a float, got {type(value).__name__}")
    if not max_norm >= 0:
        raise ValueError(f"{owner}: max_norm must be at least 0, got {max_norm}")
    if not norm_type > 0:
        raise ValueError(f"{owner}: norm_type must be positive, got {norm_type}")
    by_groups = _gradients(owner, model, expert_group)
    every = [grad for grads in by_groups.values() for grad in grads]
    device = every[0].device if every else next(model.parameters()).device
    is_max = norm_type == math.inf
    totals = torch.zeros(len(by_groups), dtype=torch.float32, device=device)
    for i, grads in enumerate(by_groups.values()):
        if grads:
            norms = torch._foreach_norm(grads, norm_type, dtype=torch.float32)
            stacked = torch.stack([norm.to(device) for norm in norms])
            totals[i] = stacked.amax() if is_max else (stacked**norm_type).sum()
    for group in dict.fromkeys(group for groups in by_groups for group in groups):
        places = [i for i, groups in enumerate(by_groups) if group in groups]
        part = totals[places]
        totals[places] = max_over_ranks(part, group) if is_max else all_reduce(part, group).wait()
    total = totals.amax() if is_max else totals.sum() ** (1.0 / norm_type)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    with torch.no_grad():
        for grad in every:
            grad.mul_(factor.to(grad.device))
    return total


@named_arguments()
def reduce_found_inf(
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    *,
    expert_group: Any = None,
) -> None:
    """Makes a ``torch.amp.GradScaler`` skip a step on all ranks that hold parts of the model.

    Each rank checks only its own gradients: without this call, other ranks would step if one rank
    found a non-finite value. Call it between the last backward and ``scaler.step``. It unscales the
    gradients unless ``scaler.unscale_`` was called. Collective over the ranks of the model's
    ``tp_group``, of DTensors' meshes, and of ``expert_group``. Does nothing if the scaler is
    disabled.

    Args:
        scaler: the gradient scaler.
        optimizer: the optimizer that ``scaler.step`` will be given.
        model: the model that has the optimizer's parameters.
        expert_group: process group over which experts' parameters, those with ``allreduce =
            False``, are distributed; None if every rank has all experts.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a module with a ``tp_size`` above 1 lacks a ``tp_group``.
    """
    owner = "reduce_found_inf"
    check_model(owner, model)
    check_process_group(owner, "expert_group", expert_group)
    if not scaler.is_enabled():
        return
    groups = dict.fromkeys(
        group for groups in _gradients(owner, model, expert_group) for group in groups
    )
    state = scaler._per_optimizer_states[id(optimizer)]
    if state["stage"] is OptState.READY:
        scaler.unscale_(optimizer)
    flags = state["found_inf_per_device"]
    for group in groups:
        for flag in flags.values():
            max_over_ranks(flag, group)
    optimizer.found_inf_is_reduced = True  # type: ignore[attr-defined]


def _gradients(
    owner: str, model: torch.nn.Module, expert_group: Any
) -> dict[tuple[Any, ...], list[torch.Tensor]]:
    """Returns this rank's gradients by the process groups whose ranks have other parts of them."""
    split = groups_of_parts(owner, model)
    found: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        groups = [*mesh_groups(parameter), *split.get(id(parameter), ())]
        if expert_group is not None and not getattr(parameter, "allreduce", True):
            groups.append(expert_group)
        grads = found.setdefault(tuple(groups), [])
        if parameter.grad is not None:
            grad: Any = parameter.grad
            if hasattr(grad, "_local_tensor"):
                of: Any = parameter
                if grad.placements != of.placements:
                    grad = parameter.grad = grad.redistribute(of.device_mesh, of.placements)
                grad = grad.to_local()
            if grad.numel():
                grads.append(grad)
    return found
