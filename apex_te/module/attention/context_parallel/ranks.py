"""The ranks over which sequences are split, and the collectives that attention needs of them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed

from ....comm.agreement import RankMismatchError, check_same
from ....comm.collectives import (
    Pending,
    all_gather_rows,
    all_reduce,
    all_to_all_rows,
    world_size,
)
from ....comm.groups import is_process_group
from ....runtime.named_arguments import did_you_mean

COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
# How many different calls (with sequences of other lengths, for example) the ranks of a group
# compare: a comparison waits for the device.
_MOST_COMPARED = 8
# What the ranks of a group have found equal. All have the same, as each call is one of all ranks.
_compared: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()


class ContextRanks:
    """Ranks that share each sequence, and how its parts meet; not part of a module's state.

    Copies of a module share it, and a pickled module has none.

    Attributes:
        group: process group, or a list of two, inner and outer; None stands for one rank.
        global_ranks, stream: as they were given.
        comm_type: one of ``COMM_TYPES``.
        size, rank: number of ranks, and this one's; inner ranks are numbered first.
    """

    def __init__(
        self,
        owner: str,
        group: Any = None,
        global_ranks: Any = None,
        stream: Any = None,
        comm_type: str | None = None,
    ) -> None:
        comm_type = "p2p" if comm_type is None else comm_type
        if comm_type not in COMM_TYPES:
            raise ValueError(
                f"{owner}: cp_comm_type must be one of {', '.join(COMM_TYPES)}, "
                f"got {comm_type!r}{did_you_mean(comm_type, COMM_TYPES)}"
            )
        given = group if isinstance(group, (list, tuple)) else (group,)
        groups = []
        for each in given:
            if each is None:
                continue
            if isinstance(each, distributed.DeviceMesh):
                each = each.get_group()
            if not is_process_group(each):
                raise TypeError(
                    f"{owner}: cp_group must be a torch.distributed.ProcessGroup, a DeviceMesh of "
                    f"one dimension or a list of such, got {type(each).__name__}"
                )
            if world_size(each) > 1:
                groups.append(each)
        if len(given) > 2 or (len(groups) > 1 and comm_type != "a2a+p2p"):
            raise ValueError(
                f"{owner}: cp_group must be one group, or a list of two with cp_comm_type "
                f"'a2a+p2p', got {len(given)} groups and {comm_type!r}"
            )
        self.group, self.global_ranks, self.stream = group, global_ranks, stream
        self.comm_type = comm_type
        self._groups = tuple(groups)
        self.size = math.prod(map(world_size, groups))
        self.rank, below = 0, 1
        for each in groups:
            self.rank += below * distributed.get_rank(each)
            below *= world_size(each)

    def __deepcopy__(self, memo: Any) -> ContextRanks:
        return self

    def __reduce__(self) -> Any:
        return ContextRanks, ("", None, None, None, self.comm_type)

    @property
    def has_one_group(self) -> bool:
        """Returns True if one group has all ranks."""
        return len(self._groups) < 2

    @property
    def chunks(self) -> tuple[int, int]:
        """Numbers of this rank's chunks, of the ``2 size`` chunks of a sequence."""
        return self.rank, 2 * self.size - 1 - self.rank

    def compare(self, owner: str, values: Mapping[str, object], device: torch.device) -> None:
        """Raises RankMismatchError on all ranks where the hashable ``values`` of a call differ.

        Values that have been equal before are not compared again, nor are those of calls after
        ``_MOST_COMPARED`` different ones.
        """
        key, error, new = tuple(values.items()), None, []
        for group in self._groups:
            known = _compared.setdefault(group, set())
            if key in known or len(known) >= _MOST_COMPARED:
                continue
            new.append(known)
            try:
                check_same(owner, "cp_group", group, values, device, error)
            except RankMismatchError as mismatch:  # which the ranks of the other group must get
                error = mismatch
        if error is not None:
            raise error
        for known in new:
            known.add(key)

    def gather(self, x: torch.Tensor) -> Pending:
        """Begins to gather ``x`` [rows, ..] of all ranks, [size * rows, ..] by rank."""
        for group in self._groups[:-1]:
            x = all_gather_rows(x, group).wait()
        return all_gather_rows(x, self._groups[-1])

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """Sends the r-th part of ``x`` [size * rows, ..] to rank r; returns the parts by rank."""
        return _exchange(x, self._groups[0])

    def send(self, x: torch.Tensor, sent: list[int], received: list[int]) -> Pending:
        """Begins to send ``sent[r]`` rows to each rank r, of the only group there is."""
        (group,) = self._groups
        return all_to_all_rows(x, sent, received, group)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of ``x`` over all ranks; ``x`` is kept."""
        x = x.clone()
        for group in self._groups:
            x = all_reduce(x, group).wait()
        return x

    def sum_parts(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of this rank's part of ``x`` [size * rows, ..] over all ranks.

        The sum is in float32 or float64, in the order of ranks, and rounded once for each group.
        """
        for group in reversed(self._groups):
            parts = _exchange(x, group).unflatten(0, (world_size(group), -1))
            wide = torch.promote_types(x.dtype, torch.float32)
            x = parts.sum(0, dtype=wide).to(x.dtype)
        return x


def _exchange(x: torch.Tensor, group: Any) -> torch.Tensor:
    ranks = world_size(group)
    rows = [x.shape[0] // ranks] * ranks
    return all_to_all_rows(x, rows, rows, group).wait()
