"""DTensors: this rank's part, tensors placed alike, and sums over their ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..comm.collectives import all_reduce, max_over_ranks

__all__ = ["ShardSums", "local", "max_over_shards", "placed", "with_part"]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a DTensor, sharing its memory; any other tensor itself."""
    part = getattr(tensor, "_local_tensor", None)
    if part is None:
        return tensor
    # What a collective is still writing is a wrapper of its own.
    return part.wait() if type(part) is not torch.Tensor and hasattr(part, "wait") else part


def with_part(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Returns ``part`` as the local part of a tensor with the shape and placement of ``tensor``."""
    if not hasattr(tensor, "_local_tensor"):
        return part
    of: Any = tensor
    return type(of).from_local(
        part, of.device_mesh, of.placements, run_check=False, shape=of.shape, stride=of.stride()
    )


def placed(owner: str, what: str, tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor``, placed as ``param`` is.

    A DTensor with other placements, Partial among them, is redistributed (a collective), as torch's
    ops do it.

    Raises:
        TypeError: one of the two is a DTensor and the other is not.
        ValueError: they are on different meshes.
    """
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


def _groups(tensor: torch.Tensor) -> list[Any]:
    """Returns the groups of ranks that have different parts of ``tensor``."""
    spec: Any = getattr(tensor, "_spec", None)
    if spec is None:
        return []
    mesh = spec.mesh
    return [
        mesh.get_group(dim)
        for dim, placement in enumerate(spec.placements)
        if not placement.is_replicate() and mesh.size(dim) > 1
    ]


def max_over_shards(flag: torch.Tensor, params: Iterable[torch.Tensor]) -> torch.Tensor:
    """Reduces ``flag`` (fp32, not negative) by maximum over all ranks with parts of ``params``.

    The flag is changed in place, by a collective for each dimension of a mesh that shards any of
    the parameters: these alone decide, so that all ranks run the same collectives.
    """
    for group in dict.fromkeys(group for param in params for group in _groups(param)):
        max_over_ranks(flag, group)
    return flag


class ShardSums:
    """Sums numbers over ranks, one for each of ``tensors``; numbers of whole tensors stay.

    Args:
        tensors: DTensors and others.
        device: device of the numbers.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        found: dict[Any, list[int]] = {}
        for i, tensor in enumerate(tensors):
            for group in _groups(tensor):
                found.setdefault(group, []).append(i)
        self._groups: list[tuple[Any, torch.Tensor | None]] = []
        for group, indices in found.items():
            some = len(indices) < len(tensors)
            index = torch.tensor(indices).to(device, non_blocking=True) if some else None
            self._groups.append((group, index))

    def __bool__(self) -> bool:
        """Returns True if any tensor is split."""
        return bool(self._groups)

    def add(self, values: torch.Tensor) -> torch.Tensor:
        """Sums ``values``, ``[..., len(tensors)]``, over the ranks in place, and returns them.

        Each dimension of a mesh that shards any of the tensors takes one collective.
        """
        for group, index in self._groups:
            if index is None:
                all_reduce(values, group).wait()
            else:
                part = all_reduce(values.index_select(-1, index), group).wait()
                values.index_copy_(-1, index, part)
        return values
