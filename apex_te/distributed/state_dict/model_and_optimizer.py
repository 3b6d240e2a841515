"""State dicts for ``torch.distributed.checkpoint`` of tensor- and expert-parallel models.

``torch.distributed.checkpoint`` assumes that plain tensors of one name are equal on all ranks. But
a module that splits itself over a ``tp_group`` has this rank's part under the name of the whole
parameter, and ranks that have some of the experts number them from 0 each. The functions here stand
in for those of ``torch.distributed.checkpoint.state_dict``, and work for any other model, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor

from ...runtime.named_arguments import check_model, named_arguments
from .fp8_state import (
    parts_of_states,
    share_headers,
    share_states,
    take_headers,
    use_own_keys,
    use_raw_names,
)
from .split_model import Entry, SplitModel, split_model
from .split_scales import check_scales, parts_of_scales, use_raw_scale_names, weight_of
from .split_tensor import Parts, SplitTensor

_Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
_Stacked = Mapping[str, Sequence[int]] | None
_Targets = Mapping[str, tuple[str, Entry]]  # by name: the other name, and its entry
_STEP = "step"  # a count, the same on all ranks
_INSTEAD = {
    "full_state_dict": "; torch.distributed.checkpoint.format_utils.dcp_to_torch_save makes one "
    "file of what torch.distributed.checkpoint has saved"
}


@named_arguments()
def get_state_dict(
    model: torch.nn.Module,
    optimizers: _Optimizers,
    *,
    expert_group: Any = ...,
    stacked: _Stacked = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns state dicts of model and optimizers to save in one checkpoint of all ranks.

    Collective: every rank calls it.

        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        torch.distributed.checkpoint.save(state, checkpoint_id=path)  # or load, then:
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    Names and shapes are those of the unsplit model on one rank, so the checkpoint can be loaded on
    any number of ranks, or in one process. Where this rank has only a part of a tensor, the entry
    is a ``SplitTensor`` with the full tensor's shape, which shares memory with the model or
    optimizer.

    FP8 weights are saved dequantized; those with free scales as FP8 data and scales, if ranks split
    them in whole blocks. Ranks that split a module save one common FP8 state: the largest amax
    values and the smallest scales. If amax values are reduced over these ranks, this equals each
    rank's state after ``flush_fp8_state()``. With ``reduce_amax=False`` the ranks' scales differ,
    and all resume with the smallest. Before loading, call ``init_fp8_state``: state dicts contain
    FP8 state only if it is allocated.

    Args:
        model: the model.
        optimizers: an optimizer of the model, or several.
        expert_group: process group over which the experts of every ``GroupedLinear`` are
            distributed, or None if every rank has all experts. Rank ``r`` has the experts from ``r
            * num_gemms`` on, as with ``TokenDispatcher``; the state dict numbers ``weight{i}`` and
            ``bias{i}`` accordingly, and with ``single_parameter`` stacks all experts. Required for
            a model with a ``GroupedLinear`` on several ranks.
        stacked: relative sizes of the matrices in parameters whose rows hold several matrices, each
            split over the ranks, by ``fnmatch`` patterns of names. Example: ``{"*.fc1.weight": (1,
            1)}`` for gate and up in a column-parallel ``Linear``. Not needed for a gated
            ``LayerNormMLP`` and ``MultiheadAttention``.
        options: ``StateDictOptions``, as in ``torch.distributed.checkpoint.state_dict``.

    Returns:
        ``(model_state_dict, optim_state_dict)``.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: ``expert_group`` or a ``tp_group`` is missing; a pattern in ``stacked`` matches
            no parameter, or the sum of its sizes does not divide a parameter's rows on a rank; or
            only some ranks have allocated FP8 state (raised on all ranks).
        NotImplementedError: ``full_state_dict`` is set for a split model, or the optimizer state of
            a split parameter has entries other than ``step``, numbers and tensors of its shape.
    """
    shared: dict[str, Any] = {"expert_group": expert_group, "stacked": stacked, "options": options}
    return (
        get_model_state_dict(model, **shared),
        get_optimizer_state_dict(model, optimizers, **shared),
    )


@named_arguments()
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
    """Loads state dicts from ``get_state_dict`` after a checkpoint was read into them.

    State dicts of the unsplit model can be loaded, too: each rank takes its part of each tensor.

    Args:
        model: the model.
        optimizers: an optimizer of the model, or several.
        model_state_dict: the model's state dict.
        optim_state_dict: the optimizers' state dict.
        expert_group, stacked, options: as passed to ``get_state_dict``.

    Returns:
        The missing and unexpected keys, as from ``torch.nn.Module.load_state_dict``.

    Raises:
        TypeError: an argument has a wrong type, or the value for a split parameter is neither a
            plain tensor nor from ``get_state_dict``.
        ValueError: a plain tensor does not have the unsplit parameter's size, a ``SplitTensor`` was
            made for another layout of ranks, or ``expert_group`` or a ``tp_group`` is missing.
        NotImplementedError: ``broadcast_from_rank0`` is set for a split model.
    """
    shared: dict[str, Any] = {"expert_group": expert_group, "stacked": stacked, "options": options}
    # The optimizer first, as in torch: its state is made by a step.
    set_optimizer_state_dict(model, optimizers, optim_state_dict, **shared)
    return set_model_state_dict(model, model_state_dict, **shared)


@named_arguments()
def get_model_state_dict(
    model: torch.nn.Module,
    *,
    expert_group: Any = ...,
    stacked: _Stacked = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """Returns the model's state dict to save in one checkpoint of all ranks; collective.

    Args:
        model: the model.
        expert_group: process group over which experts are distributed, or None; required for a
            model with a ``GroupedLinear`` on several ranks.
        stacked, options: as in ``get_state_dict``.

    Returns:
        The model's state dict, the first result of ``get_state_dict``.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: ``expert_group`` or a ``tp_group`` is missing, or ``stacked`` does not match.
        NotImplementedError: ``full_state_dict`` is set for a split model.
    """
    owner = "get_model_state_dict"
    split = _split(owner, model, expert_group, stacked, options, "full_state_dict")
    values = torch_state_dict.get_model_state_dict(model, options=options)
    use_own_keys(model, values, options is not None and options.cpu_offload)
    share_states(owner, split, values)
    share_headers(owner, split, values)
    places = parts_of_states(split)
    found = {}
    for name, value in values.items():
        weight = weight_of(name)
        entry = split.entries.get(weight)
        parts = places.get(name) if entry is None else entry.parts
        saved = name if entry is None else entry.name + name.removeprefix(weight)
        if entry is not None and weight != name:
            check_scales(owner, name, entry, value)
            parts = parts_of_scales(owner, name, entry, value)
        found[saved] = value if parts is None else SplitTensor(value, parts)
    return found


@named_arguments()
def set_model_state_dict(
    model: torch.nn.Module,
    model_state_dict: Mapping[str, Any],
    *,
    expert_group: Any = ...,
    stacked: _Stacked = None,
    options: StateDictOptions | None = None,
) -> Any:
    """Loads a state dict from ``get_model_state_dict``, or one of the unsplit model.

    Args:
        model: the model.
        model_state_dict: the model's state dict.
        expert_group, stacked, options: as passed to ``get_state_dict``.

    Returns:
        The missing and unexpected keys, as from ``torch.nn.Module.load_state_dict``.

    Raises:
        TypeError: an argument has a wrong type, or the value for a split parameter is neither a
            plain tensor nor from ``get_model_state_dict``.
        ValueError: a tensor's size or layout of ranks does not match.
        NotImplementedError: ``broadcast_from_rank0`` is set for a split model.
    """
    owner = "set_model_state_dict"
    split = _split(owner, model, expert_group, stacked, options, "broadcast_from_rank0")
    _check_saved(owner, "model_state_dict", model_state_dict)
    places, own = parts_of_states(split), _own_names(split)
    found = {}
    for name, value in model_state_dict.items():
        weight = weight_of(name)
        if weight not in split.others:
            key, entry = own.get(weight, (weight, None))
            key += name.removeprefix(weight)
            parts = places.get(name) if entry is None else entry.parts
            if entry is not None and weight != name:
                parts = parts_of_scales(owner, name, entry, value)
            found[key] = value if parts is None else _own(owner, name, value, parts)
    take_headers(owner, split, found)
    use_raw_names(model, found)
    use_raw_scale_names(model, found)
    return torch_state_dict.set_model_state_dict(model, found, options=options)


@named_arguments()
def get_optimizer_state_dict(
    model: torch.nn.Module,
    optimizers: _Optimizers,
    *,
    expert_group: Any = ...,
    stacked: _Stacked = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """Returns the optimizers' state dict to save in one checkpoint of all ranks; collective.

    Args:
        model: the model.
        optimizers: an optimizer of the model, or several.
        expert_group: process group over which experts are distributed, or None; required for a
            model with a ``GroupedLinear`` on several ranks.
        stacked, options: as in ``get_state_dict``.

    Returns:
        The optimizers' state dict, the second result of ``get_state_dict``.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: ``expert_group`` or a ``tp_group`` is missing, or ``stacked`` does not match.
        NotImplementedError: ``full_state_dict`` is set for a split model, or the optimizer state of
            a split parameter has entries other than ``step``, numbers and tensors of its shape.
    """
    owner = "get_optimizer_state_dict"
    split = _split(owner, model, expert_group, stacked, options, "full_state_dict")
    optimizers = _as_tuple(owner, optimizers)
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


@named_arguments()
def set_optimizer_state_dict(
    model: torch.nn.Module,
    optimizers: _Optimizers,
    optim_state_dict: Mapping[str, Any],
    *,
    expert_group: Any = ...,
    stacked: _Stacked = None,
    options: StateDictOptions | None = None,
) -> None:
    """Loads a state dict from ``get_optimizer_state_dict``, or one for the unsplit model.

    Args:
        model: the model.
        optimizers: an optimizer of the model, or several.
        optim_state_dict: the optimizers' state dict.
        expert_group, stacked, options: as passed to ``get_state_dict``.

    Raises:
        TypeError: an argument has a wrong type, or the value for a split parameter is neither a
            plain tensor nor from ``get_optimizer_state_dict``.
        ValueError: a tensor's size or layout of ranks does not match.
        NotImplementedError: ``broadcast_from_rank0`` is set for a split model.
    """
    owner = "set_optimizer_state_dict"
    split = _split(owner, model, expert_group, stacked, options, "broadcast_from_rank0")
    optimizers = _as_tuple(owner, optimizers)
    _check_saved(owner, "optim_state_dict", optim_state_dict)

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


def _split(
    owner: str,
    model: torch.nn.Module,
    expert_group: Any,
    stacked: _Stacked,
    options: Any,
    refused: str,
) -> SplitModel:
    """Returns the layout; a model that ranks split must not have the option ``refused``."""
    check_model(owner, model)
    if stacked is not None and not isinstance(stacked, Mapping):
        raise TypeError(
            f"{owner}: stacked must be a dict of patterns and sizes, got {type(stacked).__name__}"
        )
    if options is not None and not isinstance(options, StateDictOptions):
        raise TypeError(
            f"{owner}: options must be a torch.distributed.checkpoint.state_dict.StateDictOptions, "
            f"got {type(options).__name__}"
        )
    split = split_model(owner, model, expert_group, stacked)
    if split.entries and options is not None and getattr(options, refused):
        raise NotImplementedError(
            f"{owner}: {refused} must be False for a model that ranks split, got True"
            f"{_INSTEAD.get(refused, '')}"
        )
    return split


def _check_saved(owner: str, name: str, saved: Any) -> None:
    """Raises TypeError if ``saved``, the argument ``name``, is not a state dict."""
    if not isinstance(saved, Mapping):
        raise TypeError(
            f"{owner}: {name} must be a dict from get_state_dict, got {type(saved).__name__}"
        )


def _as_tuple(owner: str, optimizers: Any) -> tuple[Any, ...]:
    """Returns the optimizers; raises TypeError if they are none."""
    several = isinstance(optimizers, Iterable) and not isinstance(optimizers, (str, Mapping))
    found = tuple(optimizers) if several else (optimizers,)
    for one in found:
        if not hasattr(one, "param_groups"):
            raise TypeError(
                f"{owner}: optimizers must be a torch.optim.Optimizer or several, "
                f"got {type(one).__name__}"
            )
    return found


def _own_names(split: SplitModel) -> dict[str, tuple[str, Entry]]:
    """Returns the local name and the entry of each split parameter, by its name in a checkpoint."""
    return {entry.name: (name, entry) for name, entry in split.entries.items()}


def _own(owner: str, name: str, value: Any, parts: Parts) -> torch.Tensor:
    """Returns this rank's part of a value in a state dict that is to be loaded."""
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
    """Returns a copy of an optimizer's state dict with parameters renamed and values changed."""
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
