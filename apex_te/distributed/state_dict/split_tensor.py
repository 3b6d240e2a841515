"""Tensor subclass by which ``torch.distributed.checkpoint`` saves a part at its place in the whole.

A DTensor can describe one contiguous piece per rank and dimension. But a rank's rows of a parameter
that holds several matrices are several pieces, which ``fully_shard`` may divide further.
``torch.distributed.checkpoint`` itself accepts any number of pieces from a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from ..dtensor.local_parameters import shares_of

_aten = torch.ops.aten
# Ops whose result has the same parts: copies, and moves to another device.
_KEEPING = {
    _aten.detach.default, _aten.alias.default, _aten.clone.default, _aten._to_copy.default,
    _aten.empty_like.default, _aten.zeros_like.default,
}  # fmt: skip


class Parts(NamedTuple):
    """Place of a rank's part of a tensor in the full tensor.

    Attributes:
        size: size of the full tensor in ``dim``.
        pieces: ``(first, length, place)`` of each contiguous piece along ``dim``: first index in
            the part, length, and first index in the full tensor.
    """

    dim: int
    size: int
    pieces: tuple[tuple[int, int, int], ...]

    def whole_shape(self, shape: Sequence[int]) -> torch.Size:
        """Returns the shape of the full tensor, given the ``shape`` of the part."""
        return torch.Size((*shape[: self.dim], self.size, *shape[self.dim + 1 :]))

    def in_blocks(self, block: int) -> Parts | None:
        """Returns the place of scales of blocks; None if a piece begins or ends inside a block."""
        ends = [n for first, length, place in self.pieces for n in (first, place, place + length)]
        if any(n % block and n != self.size for n in ends):
            return None
        pieces = tuple((f // block, -(-n // block), place // block) for f, n, place in self.pieces)
        return Parts(self.dim, -(-self.size // block), pieces)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of ``whole``, a plain tensor; a view if it is one piece."""
        found = [whole.narrow(self.dim, first, length) for _, length, first in self.pieces]
        return found[0] if len(found) == 1 else torch.cat(found, self.dim)


def parts_of(
    dim: int, length: int, rank: int, ranks: int, matrices: tuple[int, ...] = (1,)
) -> Parts:
    """Returns the place of one rank's part in the full tensor, if all ranks have equal shares."""
    unit, first, pieces = length // sum(matrices), 0, []
    rows = tuple(size * unit * ranks for size in matrices)
    for in_whole, own in shares_of(rows, rank, ranks):
        pieces.append((first, own, in_whole))
        first += own
    return Parts(dim, length * ranks, tuple(pieces))


class SplitTensor(torch.Tensor):
    """Tensor that has the full tensor's shape, but holds only this rank's part of its data.

    ``torch.distributed.checkpoint`` saves ``local`` at its place in the full tensor, and loads into
    its memory from a checkpoint of any number of ranks. ``local`` may be a DTensor of
    ``fully_shard``. Ops other than copies and moves raise NotImplementedError.
    """

    local: torch.Tensor
    parts: Parts

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[SplitTensor], local: torch.Tensor, parts: Parts) -> SplitTensor:
        self = torch.Tensor._make_wrapper_subclass(
            cls, parts.whole_shape(local.shape), dtype=local.dtype, device=local.device
        )
        self.local = local
        self.parts = parts
        return self

    def __init__(self, *args: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        first, rest, kwargs = args[0], args[1:], kwargs or {}
        if func in _KEEPING:
            return cls(func(first.local, *rest, **kwargs), first.parts)
        if func is _aten.new_empty.default and tuple(rest[0]) == tuple(first.shape):
            return cls(func(first.local, first.local.shape, **kwargs), first.parts)
        if func is _aten.copy_.default:
            source = rest[0]
            if type(first) is cls and type(source) is cls and first.parts == source.parts:
                func(first.local, source.local, *rest[1:], **kwargs)
                return first
        raise NotImplementedError(
            f"SplitTensor: {func} must be called with its local tensor, this rank's part, got the "
            "whole, of which other ranks have the rest; torch.distributed.checkpoint saves it"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SplitTensor({self.local!r}, {self.parts})"

    # The protocol of torch.distributed.checkpoint.

    def _chunks(self) -> list[tuple[ChunkStorageMetadata, torch.Tensor]]:
        """Returns each contiguous piece as a view of ``local``, after its place in the whole."""
        local: Any = self.local
        held, offsets = local, [0] * local.dim()
        if isinstance(local, DTensor):
            if local.device_mesh.get_coordinate() is None:
                return []
            (chunk,) = local.__create_chunk_list__()
            held, offsets = local.to_local(), list(chunk.offsets)
        if not held.numel():
            return []
        dim, start = self.parts.dim, offsets[self.parts.dim]
        chunks = []
        for first, length, place in self.parts.pieces:
            low, high = max(first, start), min(first + length, start + held.shape[dim])
            if low < high:
                piece = held.narrow(dim, low - start, high - low)
                offsets[dim] = place + low - first
                chunks.append((ChunkStorageMetadata(torch.Size(offsets), piece.shape), piece))
        return chunks

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk, TensorProperties.create_from_tensor(piece), self.shape
                ),
            )
            for chunk, piece in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for chunk, _ in self._chunks()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for chunk, piece in self._chunks():
            if chunk.offsets == index.offset:
                return piece
        raise ValueError(f"SplitTensor: {index.fqn} must have a piece at {index.offset}, got none")
