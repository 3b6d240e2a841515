"""Arguments for context parallelism as attributes of the alias modules."""

from __future__ import annotations

from typing import Any

__all__ = ["ContextParallelArguments"]


class ContextParallelArguments:
    """Mixin of alias modules to which frameworks give a group of context-parallel ranks.

    Attributes:
        cp_group, cp_global_ranks, cp_stream, cp_comm_type: as they were given. A copy of the module
            loses the group.
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
        """Sets the ranks that sequences are split over, and keeps the arguments as attributes.

        Arguments and errors are those of
        ``apex_te.DotProductAttention.set_context_parallel_group``.
        """
        given = (cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        above: Any = super()
        above.set_context_parallel_group(*given)
        self.cp_group, self.cp_global_ranks, self.cp_stream, self.cp_comm_type = given
