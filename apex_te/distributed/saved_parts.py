"""A checkpoint's first tensor, of which each tensor-parallel rank saves only its part."""

from __future__ import annotations

from typing import Any

import torch

from ..comm.collectives import all_gather_rows, world_size

__all__ = ["SavedInParts"]


class SavedInParts:
    """Hooks for ``torch.autograd.graph.saved_tensors_hooks``: the first tensor is saved in parts.

    It is flattened and split into as many equal 1-D parts as ``group`` has ranks, the last padded;
    unpacking gathers them. Every rank has the same tensor and unpacks it at the same point.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._is_first = True

    def pack(self, tensor: torch.Tensor) -> Any:
        """Returns the object to save: a part of the first tensor, other tensors unchanged.

        Raises:
            NotImplementedError: a tensor subclass, whose memory may not be its elements'.
        """
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
        """Returns the whole tensor that ``pack`` was given."""
        return saved.gathered() if type(saved) is _Part else saved


class _Part:
    """This rank's part of a tensor, and the tensor's memory layout."""

    __slots__ = ("_group", "_numel", "_part", "_shape", "_stride")

    def __init__(self, tensor: torch.Tensor, group: Any) -> None:
        self._group = group
        self._shape = tensor.shape
        self._numel = numel = tensor.numel()
        # The order of memory is kept: a product of another layout could round differently.
        self._stride = torch.empty_like(tensor, device="meta").stride()
        dense = tensor if tensor.stride() == self._stride else tensor.clone()
        size = -(-numel // world_size(group))
        start = torch.distributed.get_rank(group) * size
        own = dense.as_strided((numel,), (1,))[start : start + size]
        self._part = tensor.new_zeros(size)
        self._part[: own.numel()].copy_(own)

    def gathered(self) -> torch.Tensor:
        """Gathers the parts of all ranks; returns the tensor in its former layout."""
        flat = self._part
        if self._numel:
            flat = all_gather_rows(flat, self._group).wait()[: self._numel]
        return flat.as_strided(self._shape, self._stride)
