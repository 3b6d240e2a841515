"""Conversion of optimizer states in which earlier releases had parameters in another order."""

from __future__ import annotations

from typing import Any

import torch

from ..module.grouped.linear import GroupedLinear
from ..runtime.named_arguments import check_model, named_arguments
from .fusion import JoinedNorm, norm_of


@named_arguments()
def reorder_grouped_linear_state(
    state_dict: dict[str, Any], optimizer: torch.optim.Optimizer, model: torch.nn.Module
) -> dict[str, Any]:
    """Reorders an optimizer's state dict of an earlier release for the current parameter order.

    A state dict of ``torch.optim`` numbers states by the order of parameters. Earlier releases
    registered the parameters of a ``GroupedLinear`` as weight0, weight1, .., bias0, bias1, ..; now
    their order is weight0, bias0, weight1, bias1, .., as in Transformer Engine. States by name, and
    states of layers without biases, need no reordering. Parameter groups must have been made in the
    order of ``model.parameters()``.

    Args:
        state_dict: an earlier release's ``optimizer.state_dict()``; it is not changed.
        optimizer: the optimizer that will load it, over parameters of ``model``.
        model: the model, or the part of it with the ``GroupedLinear`` layers.

    Returns:
        A state dict for ``optimizer.load_state_dict``, which shares its tensors with
        ``state_dict``.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the state dict's parameter groups do not have the sizes of the optimizer's.
    """
    _check("reorder_grouped_linear_state", state_dict, optimizer, model)
    saved = [list(group["params"]) for group in state_dict["param_groups"]]
    groups = [[id(param) for param in group["params"]] for group in optimizer.param_groups]
    sizes = [len(group) for group in groups]
    if [len(group) for group in saved] != sizes:
        raise ValueError(
            f"reorder_grouped_linear_state: state_dict must have groups of {sizes} parameters, got "
            f"{[len(group) for group in saved]}"
        )
    for module in model.modules():
        if not isinstance(module, GroupedLinear):
            continue
        names = (*module._weight_names, *module._bias_names)
        earlier = [id(getattr(module, name)) for name in names]
        for numbers, now in zip(saved, groups, strict=True):
            place = {param: i for i, param in enumerate(now)}
            own = [place[param] for param in earlier if param in place]
            # The k-th of the layer's numbers was its k-th parameter in the earlier order.
            moved = [numbers[i] for i in sorted(own)]
            for i, number in zip(own, moved, strict=True):
                numbers[i] = number
    new_groups = [
        {**group, "params": numbers}
        for group, numbers in zip(state_dict["param_groups"], saved, strict=True)
    ]
    return {**state_dict, "param_groups": new_groups}


@named_arguments()
def reorder_fused_state(
    state_dict: dict[str, Any], optimizer: torch.optim.Optimizer, model: torch.nn.Module
) -> dict[str, Any]:
    """Converts an earlier release's optimizer state for a model of ``from_torch(fuse=True)``.

    In earlier releases the norms' parameters were in the joined layers, before the weights, and
    Trainer applied weight decay to them. Parameter groups must be in the order of
    ``model.parameters()``, made as now or as Trainer made them then.

    Args:
        state_dict: an earlier release's ``optimizer.state_dict()``; it is not changed.
        optimizer: the optimizer that will load it, over parameters of ``model``.
        model: the fused model.

    Returns:
        A state dict for ``optimizer.load_state_dict``, which shares its tensors with
        ``state_dict``.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the sizes of the state dict's parameter groups are neither the optimizer's nor
            those that Trainer made then.
    """
    _check("reorder_fused_state", state_dict, optimizer, model)
    former: dict[int, int] = {}  # places in the former order, by id of the parameter
    weights = set()  # of the norms
    for module in model.modules():
        norm = norm_of(module)
        if norm is not None:
            weights.add(id(norm._parameters["weight"]))
        owners = (
            () if isinstance(module, JoinedNorm) else (module,) if norm is None else (norm, module)
        )
        for owner in owners:
            for parameter in owner._parameters.values():
                former.setdefault(id(parameter), len(former))
    now = [[id(param) for param in group["params"]] for group in optimizer.param_groups]
    saved = [list(group["params"]) for group in state_dict["param_groups"]]
    sizes = [len(group) for group in saved]
    decayed = [[p for p in group if p not in weights or at == 0] for at, group in enumerate(now)]
    decayed[0] += [p for group in now[1:] for p in group if p in weights]
    for groups in (now, decayed):
        if [len(group) for group in groups] == sizes:
            break
    else:
        raise ValueError(
            f"reorder_fused_state: state_dict must have groups of {[len(g) for g in now]} or "
            f"{[len(g) for g in decayed]} parameters, got {sizes}"
        )
    numbers: dict[int, Any] = {}
    for group, own in zip(groups, saved, strict=True):
        numbers.update(zip(sorted(group, key=lambda p: former[p]), own, strict=True))
    new_groups = [
        {**group, "params": [numbers[param] for param in params]}
        for group, params in zip(state_dict["param_groups"], now, strict=True)
    ]
    return {**state_dict, "param_groups": new_groups}


def _check(owner: str, state_dict: Any, optimizer: Any, model: Any) -> None:
    """Raises TypeError for an argument of a wrong type."""
    check_model(owner, model)
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"{owner}: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    if not isinstance(state_dict, dict) or "param_groups" not in state_dict:
        raise TypeError(
            f"{owner}: state_dict must be an optimizer's state_dict(), "
            f"got {type(state_dict).__name__}"
        )
