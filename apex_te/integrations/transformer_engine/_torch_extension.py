"""The module ``transformer_engine_torch``: by it Megatron-Core splits packed batches."""

from __future__ import annotations

import torch

from ...module.attention.context_parallel.split import own_tokens

__all__ = ["thd_get_partitioned_indices"]
__apex_te_alias__ = True


def thd_get_partitioned_indices(
    cu_seqlens: torch.Tensor, total_tokens: int, world_size: int, rank: int
) -> torch.Tensor:
    """Returns which tokens of packed sequences a context-parallel rank has, int32 [t / ranks].

    Args:
        cu_seqlens: int32 [n + 1], where the whole sequences begin and end, padding included.
        total_tokens: number of tokens of all ranks.
        world_size, rank: number of context-parallel ranks, and the one that asks.

    Returns:
        Indices on the device of ``cu_seqlens``; 0 for tokens of no sequence.

    Raises:
        TypeError: ``cu_seqlens`` is not int32.
        ValueError: ``rank`` is not one of the ranks, or a sequence cannot be cut into two chunks
            for each rank.
    """
    owner = "thd_get_partitioned_indices"
    if not 0 <= rank < world_size:
        raise ValueError(f"{owner}: rank must be from 0 to {world_size - 1}, got {rank}")
    if total_tokens % (2 * world_size):
        raise ValueError(
            f"{owner}: total_tokens must be a multiple of {2 * world_size} (2 x world_size), "
            f"got {total_tokens}"
        )
    return own_tokens(owner, cu_seqlens, total_tokens, world_size, rank)
