"""Flat parameters of one group and dtype, and this rank's shards of what belongs to them.

The parameters lie one after the other, with zeros between them and at the end, so that they begin
at multiples of 16 bytes and ranks have equal shards.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .....comm.collectives import Pending

ALIGNMENT = 8  # elements: parameters and shards begin at multiples of 16 bytes


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class Fragment(NamedTuple):
    """This rank's part of a parameter: elements of the flat parameter and of the shard."""

    param: torch.Tensor
    of_param: slice
    of_shard: slice


class Bucket:
    """Flat parameters, this rank's shards of what belongs to them, and collectives under way."""

    def __init__(
        self, group: dict[str, Any], params: list[torch.Tensor], rank: int, ranks: int
    ) -> None:
        self.group = group
        self.params = params
        self.dtype, self.device = params[0].dtype, params[0].device
        self.places: dict[torch.Tensor, slice] = {}
        end = 0
        for p in params:
            self.places[p] = slice(end, end + p.numel())
            end = _padded(end + p.numel(), ALIGNMENT)
        self.size = _padded(end, ranks * ALIGNMENT)
        self.shard_size = self.size // ranks
        first = rank * self.shard_size
        self.fragments = []
        for p, place in self.places.items():
            begin, stop = max(place.start, first), min(place.stop, first + self.shard_size)
            if begin < stop:
                of_param = slice(begin - place.start, stop - place.start)
                self.fragments.append(Fragment(p, of_param, slice(begin - first, stop - first)))
        self.state: dict[str, torch.Tensor] = {}  # shards by name
        self.grads: torch.Tensor | None = None  # of this rank alone, flat
        self.filled: set[torch.Tensor] = set()
        self.ready: set[torch.Tensor] = set()
        self.reducing: Pending | None = None
        self.grad_shard: torch.Tensor | None = None  # the sum over ranks, added up over backwards
        self.gathering: Pending | None = None

    def pieces(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns views of a flat tensor in the shapes of the parameters."""
        return [flat[place].view(p.shape) for p, place in self.places.items()]

    def shard_of_params(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns this rank's shard of the parameters, in a new tensor."""
        shard = torch.zeros(self.shard_size, dtype=dtype, device=self.device)
        for p, of_param, of_shard in self.fragments:
            shard[of_shard].copy_(p.detach().reshape(-1)[of_param])
        return shard

    def drop_grads(self, keeps_buffer: bool) -> None:
        """Drops gradients; with ``keeps_buffer`` zeroes the buffer of this rank's instead."""
        self.grad_shard = self.reducing = None
        if not keeps_buffer:
            self.grads = None
        elif self.grads is not None:
            self.grads.zero_()
        self.filled.clear()
        self.ready.clear()
