"""Writing of weights held in FP8 from parts that the ranks of a group hold, as with ZeRO."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ...comm.collectives import max_over_ranks, world_size
from ..scheme.base import layout_of
from ..tensor import QuantizedTensor
from .decode import quantizers_of, values
from .parameter import FP8Parameter
from .write import by_block, of_elements, of_scales


def replace_data(weight: FP8Parameter, data: torch.Tensor) -> None:
    """Moves a weight's FP8 data to the memory of ``data``, where they stay."""
    held = _held("replace_data", weight)
    old = held.rowwise
    assert old is not None
    if data.dtype not in (torch.uint8, old.dtype):
        raise TypeError(f"replace_data: data must be uint8 or {old.dtype}, got {data.dtype}")
    if data.numel() != old.numel() or data.device != old.device or not data.is_contiguous():
        raise ValueError(
            f"replace_data: data must be {old.numel()} contiguous elements on {old.device}, got "
            f"{list(data.shape)} with strides {list(data.stride())} on {data.device}"
        )
    new = data.detach().view(old.dtype).view(old.shape)
    new.copy_(old)
    held.rowwise = new


def drop_columnwise(weight: FP8Parameter) -> None:
    """Frees the columnwise copy of a weight after its rowwise data were written from outside."""
    held = _held("drop_columnwise", weight)
    held.columnwise = held.columnwise_scale_inv = None
    increment_version(weight)


def write_parts(
    weights: Sequence[FP8Parameter],
    parts: Sequence[torch.Tensor | None],
    starts: Sequence[int | None],
    group: Any,
) -> None:
    """Quantizes this rank's part of each weight, with the scales of the whole weights.

    After one all-reduce of amax values over ``group``, each rank has all scales and its own parts
    of the data. Once the other parts are gathered, the weight equals ``weight.copy_(whole)``. A
    part is a range of the flattened weight, or stack of weights, that begins at ``starts``; None if
    the rank has none.
    """
    _check(weights, parts, starts)
    if not weights:
        return
    with torch.no_grad():
        given = zip(weights, parts, starts, strict=True)
        pieces = [_Piece(*own) for item in given for own in _of_matrices(*item)]
        by_device: dict[torch.device, list[_Piece]] = {}
        for piece in pieces:
            by_device.setdefault(piece.device, []).append(piece)
        for members in by_device.values():
            free = [piece for piece in members if piece.weight._held.free]
            found = [piece.amax() for piece in members] + [piece.changed() for piece in free]
            amaxes = torch.cat(found)
            if world_size(group) > 1:
                max_over_ranks(amaxes, group)
            reduced = iter(amaxes.split([one.numel() for one in found]))
            own = [next(reduced) for _ in members]
            changes = {piece: next(reduced) for piece in free}
            for piece, amax in zip(members, own, strict=True):
                piece.write(amax, changes.get(piece))
    for weight in weights:
        drop_columnwise(weight)


def _held(owner: str, weight: Any) -> QuantizedTensor:
    """Returns the rowwise copy of ``weight``; raises TypeError if it is not an FP8Parameter."""
    if not isinstance(weight, FP8Parameter):
        raise TypeError(f"{owner}: weight must be an FP8Parameter, got {type(weight).__name__}")
    return weight._held


def _check(weights: Sequence[Any], parts: Sequence[Any], starts: Sequence[Any]) -> None:
    """Raises the errors of ``write_parts``."""
    if not len(weights) == len(parts) == len(starts):
        raise ValueError(
            f"write_parts: parts and starts must have {len(weights)} items, as weights has, "
            f"got {len(parts)} and {len(starts)}"
        )
    for weight, part, start in zip(weights, parts, starts, strict=True):
        _held("write_parts", weight)
        if part is None:
            continue
        if start is None or not 0 <= start <= weight.numel() - part.numel():
            raise ValueError(
                f"write_parts: starts must be from 0 to {weight.numel() - part.numel()} for a part "
                f"of {part.numel()} elements, got {start}"
            )


def _of_matrices(
    weight: FP8Parameter, part: torch.Tensor | None, start: int | None
) -> Iterator[tuple[FP8Parameter, torch.Tensor | None, int | None]]:
    """Yields a weight, or each one of a stack, with what ``part`` has of it."""
    if weight.dim() == 2:
        yield weight, part, start
        return
    size = weight.shape[1] * weight.shape[2]
    first = 0 if start is None else start
    flat = None if part is None else part.reshape(-1)
    each: Any = weight.detach().unbind(0)
    for i, matrix in enumerate(each):
        begin = max(first - i * size, 0)
        own = None if flat is None else flat[max(i * size - first, 0) : (i + 1) * size - first]
        is_mine = own is not None and own.numel() and begin < size
        yield (matrix, own, begin) if is_mine else (matrix, None, None)


class _Piece:
    """This rank's part of one weight, and the scales of the whole."""

    def __init__(self, weight: FP8Parameter, part: torch.Tensor | None, start: int | None) -> None:
        self.weight = weight
        self.device = weight.device
        self.start = 0 if start is None else start
        self.part = None if part is None else part.detach().reshape(-1).to(self.device)
        self.layout = layout_of(weight.recipe)
        self.quantizer = quantizers_of(weight.recipe, self.device).weight
        rows, cols = weight.shape
        block_rows = self.layout.block_rows or rows
        block_cols = self.layout.block_cols or cols
        self.shape = -(-rows // block_rows), block_rows, -(-cols // block_cols), block_cols
        self.blocks = self.shape[0] * self.shape[2]

    def amax(self) -> torch.Tensor:
        """Returns the amax of this rank's part of each block, fp32 ``[blocks]``."""
        if self.part is None or not self.part.numel():
            return torch.zeros(self.blocks, dtype=torch.float32, device=self.device)
        if self.blocks == 1:
            return self.part.abs().amax().float().reshape(1)
        return self._by_block(self.part.abs()).float()

    def changed(self) -> torch.Tensor:
        """Returns fp32 flags ``[blocks]``: 1 if the part changes an element of the block."""
        if self.part is None or not self.part.numel():
            return torch.zeros(self.blocks, dtype=torch.float32, device=self.device)
        old = values(self.weight.recipe, self.weight._held, self.part.dtype).view(-1)
        return self._by_block(self.part != self._own(old)).float()

    def _own(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns this rank's elements of a flattened weight."""
        assert self.part is not None
        return flat[self.start : self.start + self.part.numel()]

    def _by_block(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the maximum in each block ``[blocks]``, given this rank's elements."""
        whole = part.new_zeros(self.weight.numel())
        self._own(whole).copy_(part)
        return by_block(whole.view(self.weight.shape), self.layout).amax((1, 3)).reshape(-1)

    def write(self, amax: torch.Tensor, changes: torch.Tensor | None) -> None:
        """Writes this rank's part, and all scales, given the amax of each whole block."""
        if changes is not None:
            changes = changes.view(self.shape[0], self.shape[2])
        if not self.layout.block_rows:
            x = torch.zeros(16, device=self.device) if self.part is None else self.part
            made = self.layout.quantize_part(self.quantizer, x.view(1, -1), amax)
            self._store(made, 0, changes)
            return
        # A block's scale follows from its amax: elements of other ranks may all have that value.
        part = self.part
        dtype = torch.float32 if part is None else part.dtype
        down, high, across, wide = self.shape
        rows, cols = self.weight.shape
        tiles = amax.to(dtype).view(down, 1, across, 1).expand(self.shape)
        filled = tiles.reshape(down * high, across * wide)[:rows, :cols].contiguous()
        if part is not None:
            self._own(filled.view(-1)).copy_(part)
        self._store(self.layout.quantize(self.quantizer, filled), self.start, changes)

    def _store(self, made: QuantizedTensor, first: int, changes: torch.Tensor | None) -> None:
        """Copies scales, and this rank's part of the data, from index ``first``, to the weight."""
        assert made.rowwise is not None
        assert made.rowwise_scale_inv is not None
        weight, scale_inv = self.weight, made.rowwise_scale_inv
        if changes is not None:
            kept = weight._rowwise_scale_inv
            scale_inv = torch.where(of_scales(changes, scale_inv), scale_inv, kept)
        weight._rowwise_scale_inv.copy_(scale_inv)
        if self.part is None:
            return
        new = made.rowwise.view(torch.uint8).view(-1)[first : first + self.part.numel()]
        old = self._own(weight._rowwise.view(torch.uint8).view(-1))
        if changes is not None:
            where = of_elements(changes, self.layout, weight.shape).expand(weight.shape)
            new = torch.where(self._own(where.reshape(-1)), new, old)
        old.copy_(new)
