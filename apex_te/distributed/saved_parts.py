"""Saving a tensor for backward in parts, one on each tensor-parallel rank."""

from __future__ import annotations

from typing import Any

import torch

from ..comm.collectives import all_gather_rows, world_size


class SavedInParts:
    """Pair of hooks for ``torch.autograd.graph.saved_tensors_hooks``: ``pack`` and ``unpack``.

    The first tensor saved is flattened and padded with zeros, and each rank of ``group`` saves an
    equal share of it; other tensors are saved in full. The first tensor must be equal on all ranks.
    All ranks must unpack it at the same point, as the gather is collective.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._is_first = True

    def pack(self, tensor: torch.Tensor) -> Any:
        """Returns the object that autograd saves for ``tensor``."""
        if not self._is_first:
            return tensor
        self._is_first = False
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise NotImplementedError(
                "checkpoint: the first tensor must be a plain one with "
                f"distribute_saved_activations=True, got {type(tensor).__name__}"
            )
        return _Part(tensor.detach(), self._group)

    @staticmethod
    def unpack(saved: Any) -> torch.Tensor:
        """Returns the tensor that ``pack`` was given; collective for the first one."""
        return saved.gathered() if type(saved) is _Part else saved


class _Part:
    """Saved form of a tensor: this rank's 1-D part, and the tensor's shape and strides."""

    __slots__ = ("_group", "_numel", "_part", "_shape", "_stride")

    def __init__(self, tensor: torch.Tensor, group: Any) -> None:
        self._group = group
        self._shape = tensor.shape
        self._numel = numel = tensor.numel()
        # The order of memory is kept: a GEMM of another layout could round differently.
        self._stride = torch.empty_like(tensor, device="meta").stride()
        dense = tensor if tensor.stride() == self._stride else tensor.clone()
        size = -(-numel // world_size(group))
        start = torch.distributed.get_rank(group) * size
        own = dense.as_strided((numel,), (1,))[start : start + size]
        self._part = tensor.new_zeros(size)
        self._part[: own.numel()].copy_(own)

    def gathered(self) -> torch.Tensor:
        """Returns the whole tensor, gathered from all ranks, with its former shape and strides."""
        flat = self._part
        if self._numel:
            flat = all_gather_rows(flat, self._group).wait()[: self._numel]
        return flat.as_strided(self._shape, self._stride)
