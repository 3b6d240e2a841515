"""Which parameters of a model are parts of whole ones, and which experts are whose."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.tensor import DTensor

from ...comm.collectives import world_size
from ...fp8.autocast import is_process_group
from ...module._core.fused_casts import is_gated
from ...module._core.parallel import ParallelModule
from ...module.attention.multihead import MultiheadAttention
from ...module.grouped.linear import GroupedLinear
from ...module.layer_norm_mlp import LayerNormMLP
from .split_tensor import Parts, parts_of

__all__ = ["Entry", "SplitModel", "SplitModule", "split_model"]


class Entry(NamedTuple):
    """A parameter that other ranks have parts of, or that is one of this rank's experts."""

    every: tuple[str, ...]  # names of what all ranks have in its place, in all ranks' state dict
    name: str  # its own among these
    shape: torch.Size  # of this rank's part
    parts: Parts | None  # None: it is whole


class SplitModule(NamedTuple):
    """A module with FP8 state whose GEMMs, or groups, ranks share."""

    prefix: str
    module: Any
    tp_group: Any  # over which its GEMMs are split; None: over none
    experts: bool  # ranks have groups of their own

    @property
    def name(self) -> str:
        return self.prefix[:-1] or "the model"


class SplitModel(NamedTuple):
    """What is split of a model.

    Attributes:
        entries: by this rank's names.
        others: names of other ranks' experts.
        modules: whose FP8 state ranks share, in the order of the model.
    """

    entries: dict[str, Entry]
    others: set[str]
    modules: list[SplitModule]
    expert_group: Any


def split_model(
    owner: str,
    model: torch.nn.Module,
    expert_group: Any,
    stacked: Mapping[str, Sequence[int]] | None,
) -> SplitModel:
    """What is split of ``model``; see ``state_dict`` for the arguments and errors."""
    if expert_group is not None and expert_group is not ... and not is_process_group(expert_group):
        raise TypeError(
            f"{owner}: expert_group must be a torch.distributed.ProcessGroup or None, "
            f"got {type(expert_group).__name__}"
        )
    patterns = _checked_stacked(owner, stacked)
    unused = set(patterns)
    found = SplitModel({}, set(), [], None if expert_group is ... else expert_group)
    known: dict[int, Entry | None] = {}  # by parameter
    for raw, module, matrices in _parallel_modules(model, "", {}):
        prefix = _name(model, f"{raw}fp8_state").removesuffix("fp8_state")
        experts = False
        if isinstance(module, GroupedLinear):
            _check_experts(owner, prefix, module, expert_group)
            experts = found.expert_group is not None and world_size(found.expert_group) > 1
        elif getattr(module, "_spread", False):
            raise NotImplementedError(
                f"{owner}: experts that are spread over ranks must be those of a GroupedLinear, "
                f"got {prefix[:-1]} ({type(module).__name__})"
            )
        dims, group = _split_dims(owner, prefix, module)
        if group is not None or experts:
            found.modules.append(SplitModule(prefix, module, group, experts))
        if "_summed_gradients" in module.__dict__:  # a style made DTensors of its parameters
            dims = {}
        names = _expert_names(module, found.expert_group) if experts else {}
        for key, parameter in module._parameters.items():
            known.setdefault(id(parameter), None)
            if parameter is None or (key not in dims and key not in names):
                continue
            name, parts = prefix + key, None
            if key in dims:
                dim, sizes = dims[key], matrices.get(key, (1,))
                for pattern, given in patterns.items():
                    if dim == 0 and fnmatch.fnmatchcase(name, pattern):
                        unused.discard(pattern)
                        sizes = given
                length = parameter.shape[dim]
                if length % sum(sizes):
                    raise ValueError(
                        f"{owner}: stacked must give {name} sizes whose sum divides this rank's "
                        f"{length} rows, got {sizes}"
                    )
                rank = distributed.get_rank(group)
                parts = parts_of(dim, length, rank, world_size(group), sizes)
            every = tuple(prefix + each for each in names.get(key, (key,)))
            own = every[distributed.get_rank(expert_group) if experts else 0]
            found.entries[name] = known[id(parameter)] = Entry(every, own, parameter.shape, parts)
            found.others.update(every)
    _add_others(owner, model, found, known)
    found.others.difference_update(entry.name for entry in found.entries.values())
    if unused and any(split.tp_group is not None for split in found.modules):
        raise ValueError(
            f"{owner}: stacked must name parameters whose rows are split, got {sorted(unused)}"
        )
    return found


def _add_others(
    owner: str, model: torch.nn.Module, split: SplitModel, known: dict[int, Entry | None]
) -> None:
    """Adds other names of split parameters; refuses what says that it is split and is unknown."""
    for raw, parameter in model.named_parameters(remove_duplicate=False):
        entry = known.get(id(parameter))
        says = getattr(parameter, "tensor_model_parallel", False) and id(parameter) not in known
        says = says and not isinstance(parameter, DTensor)
        if entry is None and not says:
            continue
        name = _name(model, raw)
        if entry is None or (len(entry.every) > 1 and name not in split.entries):
            raise NotImplementedError(
                f"{owner}: split parameters must be of a module of apex_te with a tp_group, and an "
                f"expert's of no other module, got {name}"
            )
        split.entries.setdefault(name, entry._replace(every=(name,), name=name))


def _name(model: torch.nn.Module, raw: str) -> str:
    """As torch's state dict functions say it, without the wrappers that they know."""
    (name,) = _get_fqns(model, raw)
    return name


def _check_experts(owner: str, prefix: str, module: GroupedLinear, expert_group: Any) -> None:
    """Raises where it is not clear whether other ranks have other experts."""
    if world_size(None) == 1 or is_process_group(expert_group):
        return
    spread = any(getattr(p, "allreduce", True) is False for p in module.parameters())
    if expert_group is ... or spread:
        got = "none" if expert_group is ... else "None, and parameters with allreduce=False"
        raise ValueError(
            f"{owner}: expert_group must be given for {prefix[:-1]} (GroupedLinear): the ranks "
            f"that have its other experts, or None where every rank has all of them; got {got}"
        )


def _checked_stacked(
    owner: str, stacked: Mapping[str, Sequence[int]] | None
) -> dict[str, tuple[int, ...]]:
    patterns = {name: tuple(sizes) for name, sizes in (stacked or {}).items()}
    for name, sizes in patterns.items():
        if not sizes or any(type(size) is not int or size < 1 for size in sizes):
            raise ValueError(
                f"{owner}: stacked must give the relative size of each matrix as positive ints, "
                f"got {sizes} for {name!r}"
            )
    return patterns


def _parallel_modules(
    module: torch.nn.Module, prefix: str, matrices: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Any, dict[str, tuple[int, ...]]]]:
    """Modules that may be split, and what lies one after the other in their parameters."""
    if isinstance(module, ParallelModule):
        sizes: dict[str, tuple[int, ...]] = {}
        if isinstance(module, LayerNormMLP) and is_gated(module.activation):
            sizes = dict.fromkeys(("fc1_weight", "fc1_bias"), (1, 1))
        elif prefix in matrices:
            sizes = dict.fromkeys(("weight", "bias"), matrices[prefix])
        yield prefix, module, sizes
    if isinstance(module, MultiheadAttention):
        matrices = _fused_projections(module, prefix)
    for key, child in module._modules.items():  # under each name that it has
        if child is not None:
            yield from _parallel_modules(child, f"{prefix}{key}.", matrices)


def _fused_projections(attention: Any, prefix: str) -> dict[str, tuple[int, ...]]:
    """Queries, keys and values of fused projections that are not interleaved."""
    heads = attention._heads
    if heads.interleaved:
        return {}
    found: dict[str, tuple[int, ...]] = {f"{prefix}key_value.": (1, 1)}
    if heads.repeats:
        sizes = (heads.repeats, 1, 1)
        found |= {f"{prefix}layernorm_qkv.": sizes, f"{prefix}qkv.": sizes}
    return found


def _split_dims(owner: str, prefix: str, module: Any) -> tuple[dict[str, int], Any]:
    """The split dimension of each split parameter, and the ranks that have the other parts."""
    # fully_shard makes new parameters, which do not say how they are split.
    axes = getattr(module, "sharded_axes", None)  # of Megatron's names
    if axes:
        return dict(axes), module.tp_group or module._shard_group.group
    if module.tp_size == 1:
        return {}, None
    if isinstance(module, LayerNormMLP):
        modes = dict.fromkeys(("fc1_weight", "fc1_bias"), "column") | {"fc2_weight": "row"}
        modes = modes if module.set_parallel_mode else {}
    else:
        norms = ("layer_norm_weight", "layer_norm_bias")
        modes = {key: module.parallel_mode for key in module._parameters if key not in norms}
    dims = {
        key: 0 if mode == "column" else 1
        for key, mode in modes.items()
        if mode == "column" or (mode == "row" and "weight" in key)
    }
    if not dims:
        return {}, None
    if module.tp_group is None:
        raise ValueError(
            f"{owner}: set_tensor_parallel_group must be called of {prefix[:-1]}, which has "
            f"tp_size={module.tp_size} and no tp_group"
        )
    return dims, module.tp_group


def _expert_names(module: Any, group: Any) -> dict[str, tuple[str, ...]]:
    """Names of each parameter among the experts of all ranks, by rank."""
    gemms, ranks = module.num_gemms, world_size(group)
    return {
        f"{kind}{i}": tuple(f"{kind}{rank * gemms + i}" for rank in range(ranks))
        for kind in ("weight", "bias")
        for i in range(gemms)
    }
