"""State dicts for ``torch.distributed.checkpoint`` of models that ``tp_group`` and experts split.

``torch.distributed.checkpoint`` takes plain tensors of one name to be the same on all ranks. But
modules that split themselves over a ``tp_group`` have this rank's part under the name of the whole,
and ranks with experts of their own count them from 0. The functions here do what those of
``torch.distributed.checkpoint.state_dict`` do, for such models and for any others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor

from .fp8_state import parts_of_states, share_headers, share_states, take_headers
from .split_model import Entry, SplitModel, split_model
from .split_tensor import Parts, SplitTensor

__all__ = [
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

_Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
_Stacked = Mapping[str, Sequence[int]] | None
_Targets = Mapping[str, tuple[str, Entry]]  # by name: the other name, and its entry
_STEP = "step"  # a count, the same on all ranks


def get_state_dict(
    model: torch.nn.Module,
    optimizers: _Optimizers,
    *,
    expert_group: Any = ...,
    stacked: _Stacked = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the state dicts of ``model`` and ``optimizers`` that all ranks share; collective.

        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        torch.distributed.checkpoint.save(state, checkpoint_id=path)  # or load, then:
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    Names and shapes are those of the model on one rank: a checkpoint of some ranks loads on any
    other number of ranks, and fits the state dicts of the model in one process. Parts are tensors
    of the whole's shape (``SplitTensor``) that share the memory of model and optimizer.

    FP8 weights are saved in high precision. The ranks of a split module save one FP8 state: the
    largest of their amaxes, the smallest of their scales. If amaxes are reduced over these ranks,
    that is each rank's own state after ``flush_fp8_state()``; with ``reduce_amax=False`` the ranks
    go on from one scale. ``init_fp8_state`` allocates the state that is to be loaded.

    Args:
        model: the model.
        optimizers: an optimizer of it, or several.
        expert_group: the ranks over which the experts of every ``GroupedLinear`` are spread: rank r
            has those from ``r * num_gemms`` on, as with ``TokenDispatcher``, and the numbers in
            ``weight{i}`` and ``bias{i}`` become those among all. None if every rank has all
            experts. Required for a model with a ``GroupedLinear`` on several ranks.
        stacked: relative sizes of the matrices that lie one after the other in the rows of a
            parameter, each of which is split over the ranks, by ``fnmatch`` patterns of names:
            ``{"*.fc1.weight": (1, 1)}`` for a gate and its factor in a column-parallel ``Linear``.
            Not needed for a gated ``LayerNormMLP`` and ``MultiheadAttention``.
        options: as in ``torch.distributed.checkpoint.state_dict``.

    Returns:
        The model's state dict and the optimizers'.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: a missing ``expert_group`` or ``tp_group``; ``stacked`` that fits no parameter;
            on all ranks, FP8 state that some of them lack.
        NotImplementedError: ``full_state_dict`` of a split model; optimizer state of a split
            parameter other than ``step`` and tensors of its shape.
    """
    shared: dict[str, Any] = {"expert_group": expert_group, "stacked": stacked, "options": options}
    return (
        get_model_state_dict(model, **shared),
        get_optimizer_state_dict(model, optimizers, **shared),
    )


def set_state_dict(
    model: torch.nn.Module,
    optimizers: _Optimizers,
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    expert_group: Any = ...,
    stacked: _Stacked = None,
    options: StateDictOptions | None = None,
) -> Any:
    """Loads state dicts that ``get_state_dict`` gave and a checkpoint has filled.

    State dicts of the model on one rank load, too: each rank keeps its part. Other arguments and
    errors are those of ``get_state_dict``.

    Returns:
        The missing and unexpected keys, as ``torch.nn.Module.load_state_dict``.

    Raises:
        ValueError: a tensor that is not whole.
        NotImplementedError: ``broadcast_from_rank0`` for a split model.
    """
    shared: dict[str, Any] = {"expert_group": expert_group, "stacked": stacked, "options": options}
    # The optimizer first, as in torch: its state is made by a step.
    set_optimizer_state_dict(model, optimizers, optim_state_dict, **shared)
    return set_model_state_dict(model, model_state_dict, **shared)


def get_model_state_dict(
    model: torch.nn.Module,
    *,
    expert_group: Any = ...,
    stacked: _Stacked = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """Returns the model's state dict, as ``get_state_dict`` does."""
    owner = "get_model_state_dict"
    split = _split_to_get(owner, model, expert_group, stacked, options)
    values = torch_state_dict.get_model_state_dict(model, options=options)
    share_states(owner, split, values)
    share_headers(owner, split, values)
    places = parts_of_states(split)
    found = {}
    for name, value in values.items():
        entry = split.entries.get(name)
        parts = places.get(name) if entry is None else entry.parts
        saved = name if entry is None else entry.name
        found[saved] = value if parts is None else SplitTensor(value, parts)
    return found


def set_model_state_dict(
    model: torch.nn.Module,
    model_state_dict: Mapping[str, Any],
    *,
    expert_group: Any = ...,
    stacked: _Stacked = None,
    options: StateDictOptions | None = None,
) -> Any:
    """Loads the model's state dict, as ``set_state_dict`` does."""
    owner = "set_model_state_dict"
    split = _split_to_set(owner, model, expert_group, stacked, options)
    places, own = parts_of_states(split), _own_names(split)
    found = {}
    for name, value in model_state_dict.items():
        if name not in split.others:
            key, entry = own.get(name, (name, None))
            parts = places.get(name) if entry is None else entry.parts
            found[key] = value if parts is None else _own(owner, name, value, parts)
    take_headers(owner, split, found)
    return torch_state_dict.set_model_state_dict(model, found, options=options)


def get_optimizer_state_dict(
    model: torch.nn.Module,
    optimizers: _Optimizers,
    *,
    expert_group: Any = ...,
    stacked: _Stacked = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """Returns the optimizers' state dict, as ``get_state_dict`` does."""
    owner = "get_optimizer_state_dict"
    split = _split_to_get(owner, model, expert_group, stacked, options)
    state: Any = torch_state_dict.get_optimizer_state_dict(model, optimizers, options=options)

    def shared(entry: Entry, name: str, value: Any) -> Any:
        parts = entry.parts
        if parts is None or name.endswith("." + _STEP):
            return value
        if isinstance(value, torch.Tensor) and value.shape == entry.shape:
            return SplitTensor(value, parts)
        if isinstance(value, (bool, int, float)):
            return value
        got = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise NotImplementedError(
            f"{owner}: {name} must be a tensor of its parameter's shape {list(entry.shape)}, which "
            f"is a part of the whole, got {got}"
        )

    targets = {name: (entry.name, entry) for name, entry in split.entries.items()}
    found = _renamed(state, targets, set(), shared)
    for group in found.get("param_groups", ()):  # those of all ranks, as one rank would have them
        group["params"] = [
            each
            for name in group["params"]
            for each in (split.entries[name].every if name in split.entries else (name,))
        ]
    return found


def set_optimizer_state_dict(
    model: torch.nn.Module,
    optimizers: _Optimizers,
    optim_state_dict: Mapping[str, Any],
    *,
    expert_group: Any = ...,
    stacked: _Stacked = None,
    options: StateDictOptions | None = None,
) -> None:
    """Loads the optimizers' state dict, as ``set_state_dict`` does."""
    owner = "set_optimizer_state_dict"
    split = _split_to_set(owner, model, expert_group, stacked, options)

    def own(entry: Entry, name: str, value: Any) -> Any:
        if entry.parts is None or name.endswith("." + _STEP):
            return value
        return _own(owner, name, value, entry.parts) if torch.is_tensor(value) else value

    names = _own_names(split)
    found = _renamed(optim_state_dict, names, split.others, own)
    for group in found.get("param_groups", ()):
        group["params"] = [
            names[name][0] if name in names else name
            for name in group["params"]
            if name not in split.others
        ]
    torch_state_dict.set_optimizer_state_dict(model, optimizers, found, options=options)


def _split_to_get(
    owner: str, model: torch.nn.Module, expert_group: Any, stacked: _Stacked, options: Any
) -> SplitModel:
    split = split_model(owner, model, expert_group, stacked)
    if split.entries and options is not None and options.full_state_dict:
        raise NotImplementedError(
            f"{owner}: full_state_dict must be False for a model that ranks split, got True; "
            "torch.distributed.checkpoint.format_utils.dcp_to_torch_save makes one file of what "
            "torch.distributed.checkpoint has saved"
        )
    return split


def _split_to_set(
    owner: str, model: torch.nn.Module, expert_group: Any, stacked: _Stacked, options: Any
) -> SplitModel:
    split = split_model(owner, model, expert_group, stacked)
    if split.entries and options is not None and options.broadcast_from_rank0:
        raise NotImplementedError(
            f"{owner}: broadcast_from_rank0 must be False for a model that ranks split, got True"
        )
    return split


def _own_names(split: SplitModel) -> dict[str, tuple[str, Entry]]:
    return {entry.name: (name, entry) for name, entry in split.entries.items()}


def _own(owner: str, name: str, value: Any, parts: Parts) -> torch.Tensor:
    """Returns this rank's part of a tensor in a state dict."""
    if isinstance(value, SplitTensor) and value.parts == parts:
        return value.local
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        raise TypeError(
            f"{owner}: {name} must be a plain tensor or of get_state_dict, "
            f"got {type(value).__name__}"
        )
    if isinstance(value, SplitTensor) or (
        value.dim() <= parts.dim or value.shape[parts.dim] != parts.size
    ):
        got = value.parts if isinstance(value, SplitTensor) else list(value.shape)
        raise ValueError(
            f"{owner}: {name} must be the whole, of {parts.size} in dimension {parts.dim}, or what "
            f"get_state_dict has of {parts}, got {got}"
        )
    return parts.cut(value)


def _renamed(
    state: Mapping[str, Any],
    targets: _Targets,
    dropped: set[str],
    change: Callable[[Entry, str, Any], Any],
) -> dict[str, Any]:
    """Returns an optimizer's state dict, nested or flat, with other names and changed values."""
    found: dict[str, Any]
    if "state" in state:
        found = {**state, "state": {}}
        for name, values in state["state"].items():
            if name not in dropped:
                key, entry = targets.get(name, (name, None))
                found["state"][key] = (
                    dict(values)
                    if entry is None
                    else {k: change(entry, f"{name}.{k}", v) for k, v in values.items()}
                )
        found["param_groups"] = [dict(group) for group in state.get("param_groups", ())]
        return found
    found = {}
    for key, value in state.items():
        section, _, rest = key.partition(".")
        name = rest
        while name and name not in targets and name not in dropped:
            name = name.rpartition(".")[0]
        if not name:
            found[key] = value
        elif name not in dropped:
            new, entry = targets[name]
            value = change(entry, rest, value) if section == "state" else value
            found[f"{section}.{new}{rest.removeprefix(name)}"] = value
    return found
