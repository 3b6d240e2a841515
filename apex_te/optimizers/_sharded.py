"""Helpers for DTensors: local tensors, placements, and reductions over the ranks of their meshes.

All of them take plain tensors, too, which every rank has whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..comm.collectives import all_reduce
from ..comm.shards import mesh_groups


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the local tensor of a DTensor, which shares its memory; a plain tensor itself."""
    part = getattr(tensor, "_local_tensor", None)
    if part is None:
        return tensor
    # A collective that is still writing the local tensor has it in a wrapper with wait().
    return part.wait() if type(part) is not torch.Tensor and hasattr(part, "wait") else part


def with_part(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Returns this rank's ``part`` as a DTensor like ``tensor``; as it is if that is plain."""
    if not hasattr(tensor, "_local_tensor"):
        return part
    of: Any = tensor
    return type(of).from_local(
        part, of.device_mesh, of.placements, run_check=False, shape=of.shape, stride=of.stride()
    )


def placed(owner: str, what: str, tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor`` with the placements of ``param``, by collectives if it has others."""
    spec, wanted = getattr(tensor, "_spec", None), getattr(param, "_spec", None)
    if spec is wanted:
        return tensor
    if spec is None or wanted is None:
        kind = "plain tensors" if wanted is None else "DTensors"
        raise TypeError(
            f"{owner}: {what} must be {kind}, as their parameters are, got "
            f"{type(tensor).__name__} for {type(param).__name__}"
        )
    same_mesh = spec.mesh is wanted.mesh or spec.mesh == wanted.mesh
    if same_mesh and spec.placements == wanted.placements:
        return tensor
    if not same_mesh:
        raise ValueError(
            f"{owner}: {what} must be on the mesh of their parameter, {wanted.mesh}, "
            f"got {spec.mesh}"
        )
    moved: Any = tensor
    return moved.redistribute(wanted.mesh, wanted.placements)


class ShardSums:
    """Sums over ranks of numbers that each rank has computed from its local tensors.

    Numbers of sharded DTensors are summed over the ranks that hold other shards; those of tensors
    that the rank has whole are left as they are.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        found: dict[Any, list[int]] = {}
        for i, tensor in enumerate(tensors):
            for group in mesh_groups(tensor):
                found.setdefault(group, []).append(i)
        self._groups: list[tuple[Any, torch.Tensor | None]] = []
        for group, indices in found.items():
            some = len(indices) < len(tensors)
            index = torch.tensor(indices).to(device, non_blocking=True) if some else None
            self._groups.append((group, index))

    def __bool__(self) -> bool:
        """Returns True if any of the tensors is sharded, so that ``add`` runs collectives."""
        return bool(self._groups)

    def add(self, values: torch.Tensor) -> torch.Tensor:
        """Sums numbers over ranks, in place, by one collective for each process group."""
        for group, index in self._groups:
            if index is None:
                all_reduce(values, group).wait()
            else:
                part = all_reduce(values.index_select(-1, index), group).wait()
                values.index_copy_(-1, index, part)
        return values
