"""Process groups whose ranks have other parts of a parameter, and reductions over these."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import distributed

from .collectives import max_over_ranks, world_size

_NAME = "tensor_parallel_group"  # attribute of a parameter; a name, as a group cannot be pickled


def note_group(parameter: torch.Tensor, group: Any) -> None:
    """Stores the process group that splits a plain parameter, for ``part_groups``."""
    if group is not None and world_size(group) > 1:
        setattr(parameter, _NAME, group.group_name)


def mesh_groups(tensor: torch.Tensor) -> list[Any]:
    """Returns the groups that shard a DTensor, one for each mesh dimension that shards it."""
    spec: Any = getattr(tensor, "_spec", None)
    if spec is None:
        return []
    mesh = spec.mesh
    return [
        mesh.get_group(dim)
        for dim, placement in enumerate(spec.placements)
        if not placement.is_replicate() and mesh.size(dim) > 1
    ]


def part_groups(parameter: torch.Tensor) -> list[Any]:
    """Returns the groups that split a parameter: a DTensor's by its mesh, or the noted group."""
    name = getattr(parameter, _NAME, None)
    if name is None or hasattr(parameter, "_spec") or not distributed.is_initialized():
        return mesh_groups(parameter)
    return [distributed.distributed_c10d._resolve_process_group(name)]


def max_over_shards(flag: torch.Tensor, params: Iterable[torch.Tensor]) -> torch.Tensor:
    """Reduces ``flag`` (fp32, at least 0) by maximum over the ranks of ``params``, in place."""
    for group in dict.fromkeys(group for param in params for group in part_groups(param)):
        max_over_ranks(flag, group)
    return flag
