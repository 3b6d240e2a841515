"""Shares of tensors and of the vocabulary."""

from __future__ import annotations

import torch

from ..utils import divide


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> list[torch.Tensor]:
    """Returns equal shares of the last dimension, as views unless they are to be contiguous.

    Args:
        tensor: tensor of any shape and dtype.
        num_partitions: number of shares.
        contiguous_split_chunks: True makes each share contiguous.

    Raises:
        ValueError: ``num_partitions`` does not divide the last dimension.
    """
    parts = tensor.split(divide(tensor.shape[-1], num_partitions), -1)
    return [part.contiguous() if contiguous_split_chunks else part for part in parts]


class VocabUtility:
    """Ranges of the vocabulary, (first, last + 1), that ranks hold."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Returns a rank's range (first, last + 1), from the number of entries of every rank.

        Args:
            per_partition_vocab_size: number of entries that each rank has.
            rank: the rank, from 0.
            world_size: not read.
        """
        first = rank * per_partition_vocab_size
        return first, first + per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(
        global_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Returns a rank's range, from the size of the vocabulary.

        Raises:
            ValueError: ``world_size`` does not divide the vocabulary.
        """
        size = divide(global_vocab_size, world_size)
        return VocabUtility.vocab_range_from_per_partition_vocab_size(size, rank, world_size)
