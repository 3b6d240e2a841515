"""Layout of a model that ranks split: which parts of parameters and which experts a rank has."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.tensor import DTensor

from ...comm.collectives import world_size
from ...comm.groups import is_process_group
from ...module._core.fused_casts import is_gated
from ...module._core.parallel import ParallelModule
from ...module.attention.dot_product import DotProductAttention
from ...module.attention.multihead import MultiheadAttention
from ...module.grouped.linear import GroupedLinear
from ...module.layer_norm_mlp import LayerNormMLP
from .split_tensor import Parts, parts_of


class Entry(NamedTuple):
    """Layout of a parameter that is split over tensor-parallel ranks or belongs to an expert.

    Attributes:
        every: the parameter's names in a checkpoint, one for each rank of the expert group;
            ``(name,)`` if it does not belong to one expert.
        name: name of this rank's parameter in a checkpoint.
        shape: shape of this rank's part.
        parts: place of this rank's part; None if this rank has the whole parameter.
    """

    every: tuple[str, ...]
    name: str
    shape: torch.Size
    parts: Parts | None


class SplitModule(NamedTuple):
    """Module with FP8 state whose GEMMs or experts are divided among ranks."""

    prefix: str
    module: Any
    tp_group: Any
    experts: bool

    @property
    def name(self) -> str:
        """Name of the module in error messages."""
        return self.prefix[:-1] or "the model"


class SplitModel(NamedTuple):
    """Layout of a model: all parameters and FP8 states that are divided among ranks."""

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
    """Returns the layout of ``model`` over ranks."""
    if expert_group is not None and expert_group is not ... and not is_process_group(expert_group):
        raise TypeError(
            f"{owner}: expert_group must be a torch.distributed.ProcessGroup or None, "
            f"got {type(expert_group).__name__}"
        )
    patterns = _Patterns(owner, stacked)
    found = SplitModel({}, set(), [], None if expert_group is ... else expert_group)
    known: dict[int, Entry | None] = {}  # by parameter
    for raw, module, matrices in _parallel_modules(model, "", {}):
        prefix = state_name(model, f"{raw}training").removesuffix("training")  # any attribute
        experts = _has_own_experts(owner, prefix, module, expert_group)
        dims, group = _split_dims(owner, prefix, module)
        if isinstance(module, ParallelModule) and (group is not None or experts):
            found.modules.append(SplitModule(prefix, module, group, experts))
        if "_summed_gradients" in module.__dict__:  # a style made DTensors of its parameters
            dims = {}
        stacks = experts and module.single_parameter  # a rank has some of each parameter's rows
        names = _expert_names(module, expert_group) if experts and not stacks else {}
        if stacks and dims:
            raise NotImplementedError(
                f"{owner}: single_parameter must be False for {prefix[:-1]}, whose experts are "
                "spread over ranks and split over others, got True"
            )
        for key, parameter in module._parameters.items():
            known.setdefault(id(parameter), None)
            if parameter is None or not (stacks or key in dims or key in names):
                continue
            parts = None
            if stacks:
                parts = _own_parts(owner, prefix + key, parameter.shape, 0, (1,), expert_group)
            elif key in dims:
                sizes = patterns.sizes(prefix + key, dims[key], matrices.get(key, (1,)))
                parts = _own_parts(owner, prefix + key, parameter.shape, dims[key], sizes, group)
            every = tuple(prefix + each for each in names.get(key, (key,)))
            own = every[distributed.get_rank(expert_group) if key in names else 0]
            found.entries[prefix + key] = known[id(parameter)] = Entry(
                every, own, parameter.shape, parts
            )
            found.others.update(every)
    _add_others(owner, model, found, known)
    found.others.difference_update(entry.name for entry in found.entries.values())
    if any(split.tp_group is not None for split in found.modules):
        patterns.check_used()
    return found


class Split(NamedTuple):
    """Division of a parameter over a ``tp_group``.

    Attributes:
        dim: the dimension that is divided.
        matrices: relative sizes of the matrices that are concatenated in ``dim``, each divided by
            itself.
        group: the process group.
    """

    dim: int
    matrices: tuple[int, ...]
    group: Any

    @property
    def ranks(self) -> int:
        """Number of ranks that have a part."""
        return world_size(self.group)

    def parts(self, length: int, rank: int) -> Parts:
        """Returns the slices of ``dim`` that ``rank`` holds; ``length`` is the size of its part."""
        return parts_of(self.dim, length, rank, self.ranks, self.matrices)


def splits_of(owner: str, model: torch.nn.Module) -> dict[int, Split]:
    """Returns, by ``id`` of each parameter that a ``tp_group`` splits, how it does."""
    found = {}
    for raw, module, matrices in _parallel_modules(model, "", {}):
        dims, group = _split_dims(owner, raw, module)
        if "_summed_gradients" in module.__dict__ or group is None:
            continue  # DTensors say themselves how they are split
        for key, dim in dims.items():
            parameter = module._parameters.get(key)
            if parameter is not None:
                sizes = matrices.get(key, (1,)) if dim == 0 else (1,)
                found[id(parameter)] = Split(dim, sizes, group)
    return found


def groups_of_parts(owner: str, model: torch.nn.Module) -> dict[int, tuple[Any, ...]]:
    """Returns, by ``id`` of each parameter that a ``tp_group`` splits, ``(tp_group,)``."""
    return {key: (split.group,) for key, split in splits_of(owner, model).items()}


class _Patterns:
    """Checked argument ``stacked`` of ``get_state_dict``, which remembers the patterns that fit."""

    def __init__(self, owner: str, stacked: Mapping[str, Sequence[int]] | None) -> None:
        self._owner = owner
        self._sizes = {name: tuple(sizes) for name, sizes in (stacked or {}).items()}
        self._unused = set(self._sizes)
        for name, sizes in self._sizes.items():
            if not sizes or any(type(size) is not int or size < 1 for size in sizes):
                raise ValueError(
                    f"{owner}: stacked must give the relative size of each matrix as positive "
                    f"ints, got {sizes} for {name!r}"
                )

    def sizes(self, name: str, dim: int, default: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the relative sizes of the matrices in a parameter."""
        found = default
        for pattern, sizes in self._sizes.items() if dim == 0 else ():
            if fnmatch.fnmatchcase(name, pattern):
                self._unused.discard(pattern)
                found = sizes
        return found

    def check_used(self) -> None:
        """Raises ValueError if a pattern fitted no name in any call of ``sizes``."""
        if self._unused:
            raise ValueError(
                f"{self._owner}: stacked must name parameters whose rows are split, "
                f"got {sorted(self._unused)}"
            )


def _own_parts(
    owner: str, name: str, shape: torch.Size, dim: int, sizes: tuple[int, ...], group: Any
) -> Parts:
    """Returns the place of this rank's part in the whole parameter."""
    length = shape[dim]
    if length % sum(sizes):
        raise ValueError(
            f"{owner}: stacked must give {name} sizes whose sum divides this rank's "
            f"{length} rows, got {sizes}"
        )
    return parts_of(dim, length, distributed.get_rank(group), world_size(group), sizes)


def _add_others(
    owner: str, model: torch.nn.Module, split: SplitModel, known: dict[int, Entry | None]
) -> None:
    """Adds entries for further names of divided parameters, such as those of tied weights."""
    for raw, parameter in model.named_parameters(remove_duplicate=False):
        entry = known.get(id(parameter))
        says = getattr(parameter, "tensor_model_parallel", False) and id(parameter) not in known
        says = says and not isinstance(parameter, DTensor)
        if entry is None and not says:
            continue
        name = state_name(model, raw)
        if entry is None or (len(entry.every) > 1 and name not in split.entries):
            raise NotImplementedError(
                f"{owner}: split parameters must be of a module of apex_te with a tp_group, and an "
                f"expert's of no other module, got {name}"
            )
        split.entries.setdefault(name, entry._replace(every=(name,), name=name))


def state_name(model: torch.nn.Module, raw: str) -> str:
    """Returns a parameter's name in torch's state dicts: ``raw`` without prefixes such as DDP's."""
    (name,) = _get_fqns(model, raw)
    return name


def _has_own_experts(owner: str, prefix: str, module: Any, expert_group: Any) -> bool:
    """Returns True if the ranks of ``expert_group`` have different experts in ``module``."""
    if not isinstance(module, GroupedLinear):
        if getattr(module, "_spread", False):
            raise NotImplementedError(
                f"{owner}: experts that are spread over ranks must be those of a GroupedLinear, "
                f"got {prefix[:-1]} ({type(module).__name__})"
            )
        return False
    if is_process_group(expert_group):
        return world_size(expert_group) > 1
    if world_size(None) > 1:
        spread = any(getattr(p, "allreduce", True) is False for p in module.parameters())
        if expert_group is ... or spread:
            got = "none" if expert_group is ... else "None, and parameters with allreduce=False"
            raise ValueError(
                f"{owner}: expert_group must be given for {prefix[:-1]} (GroupedLinear): the ranks "
                f"that have its other experts, or None where every rank has all of them; got {got}"
            )
    return False


def _parallel_modules(
    module: torch.nn.Module, prefix: str, matrices: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Any, dict[str, tuple[int, ...]]]]:
    """Yields prefix and module of the parallel modules below ``module``, under each of their names.

    The third value has, by parameter name, the relative sizes of matrices that its rows hold.
    """
    if isinstance(module, (ParallelModule, DotProductAttention)):
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
    """Returns relative sizes of query, key and value rows, by prefix of the fused projection."""
    heads = attention._heads
    if heads.interleaved:
        return {}
    found: dict[str, tuple[int, ...]] = {f"{prefix}key_value.": (1, 1)}
    if heads.repeats:
        sizes = (heads.repeats, 1, 1)
        found |= {f"{prefix}layernorm_qkv.": sizes, f"{prefix}qkv.": sizes}
    return found


def _split_dims(owner: str, prefix: str, module: Any) -> tuple[dict[str, int], Any]:
    """Returns the dimension of each split parameter, and the ranks' group; or ``({}, None)``."""
    # fully_shard makes new parameters, which do not say how they are split.
    axes = getattr(module, "sharded_axes", None)  # of Megatron's names
    if axes:
        return dict(axes), module.tp_group or module._shard_group.group
    if module.tp_size == 1:
        return {}, None
    if isinstance(module, LayerNormMLP):
        modes = dict.fromkeys(("fc1_weight", "fc1_bias"), "column") | {"fc2_weight": "row"}
        modes = modes if module.set_parallel_mode else {}
    elif isinstance(module, DotProductAttention):
        learnable = module._parameters.get("softmax_offset") is not None
        modes = dict.fromkeys(("softmax_offset",) if learnable else (), "column")
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
    """Returns, by local name (``weight0``), the parameter's name in a checkpoint for each rank."""
    gemms, ranks = module.num_gemms, world_size(group)
    return {
        f"{kind}{i}": tuple(f"{kind}{rank * gemms + i}" for rank in range(ranks))
        for kind in ("weight", "bias")
        for i in range(gemms)
    }
