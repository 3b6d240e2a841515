"""Arguments for context parallelism; apex_te serves one rank."""

from __future__ import annotations

from typing import Any

from ...comm.collectives import world_size
from ...module._core.parallel import CompositeModule

__all__ = ["ContextParallelArguments"]

_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")


class ContextParallelArguments:
    """Mixin of alias modules to which frameworks give a group of context-parallel ranks.

    Attributes:
        cp_group: the group, or None; attention sees whole sequences in any case.
        cp_global_ranks, cp_stream, cp_comm_type: kept as they were given.
    """

    cp_group: Any = None
    cp_global_ranks: Any = None
    cp_stream: Any = None
    cp_comm_type: str = "p2p"

    def set_context_parallel_group(
        self,
        cp_group: Any,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
    ) -> None:
        """Keeps the arguments, and hands them to the modules inside that have this method."""
        owner = type(self).__name__
        for group in cp_group if isinstance(cp_group, (list, tuple)) else (cp_group,):
            ranks = 1 if group is None else world_size(group)
            if ranks > 1:
                raise NotImplementedError(
                    f"{owner}: cp_group must be None or have one rank, since apex_te has no "
                    f"context parallelism, got {ranks} ranks"
                )
        if cp_comm_type not in (*_TYPES, None):
            raise ValueError(
                f"{owner}: cp_comm_type must be one of {', '.join(_TYPES)}, got {cp_comm_type!r}"
            )
        self.cp_group = cp_group
        self.cp_global_ranks = cp_global_ranks
        self.cp_stream = cp_stream
        self.cp_comm_type = cp_comm_type
        if isinstance(self, CompositeModule):
            args = (cp_group, cp_global_ranks, cp_stream, cp_comm_type)
            self._call_children("set_context_parallel_group", *args)
