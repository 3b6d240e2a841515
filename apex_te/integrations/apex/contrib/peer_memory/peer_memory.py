"""Pools of peer memory: their interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

__all__ = ["PeerMemoryPool"]


class PeerMemoryPool:
    """Pool for ``PeerHaloExchanger1d`` and ``HaloExchangerPeer``, which allocate nothing from it.

    Args:
        static_size, dynamic_size: bytes, not reserved.
        peer_ranks: ranks that share the pool; None means all.

    Source: apex.contrib.peer_memory.
    """

    def __init__(
        self, static_size: int, dynamic_size: int, peer_ranks: Sequence[int] | None = None
    ) -> None:
        self.static_size, self.dynamic_size = static_size, dynamic_size
        self.peer_ranks = peer_ranks

    def reset(self) -> None:
        """Does nothing: there are no dynamic tensors to give back."""

    def allocate_peer_tensors(
        self, shape: Sequence[int], dtype: torch.dtype, channels_last: bool, dynamic: bool
    ) -> NoReturn:
        """Raises NotImplementedError, naming PyTorch's shared tensors; no argument is read."""
        raise NotImplementedError(
            "PeerMemoryPool.allocate_peer_tensors: memory of peers is not supported; allocate with "
            "torch.distributed._symmetric_memory.empty and share with its rendezvous"
        )
