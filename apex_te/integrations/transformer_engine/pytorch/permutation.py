"""Permutation of the tokens of a mixture of experts, with Transformer Engine's signatures."""

from __future__ import annotations

import torch

from .... import permutation as _permutation
from ....permutation import (
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
)

__all__ = [
    "moe_permute", "moe_permute_and_pad_with_probs", "moe_permute_with_probs",
    "moe_sort_chunks_by_index", "moe_sort_chunks_by_index_with_probs", "moe_unpermute",
]  # fmt: skip


def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: torch.Size | tuple[int, ...] | None = None,
    map_type: str = "mask",
    probs: torch.Tensor | None = None,
    pad_offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums the rows of each token, times their probs if given; differentiable in both.

    It is ``apex_te.moe_unpermute``, whose errors it has, too.

    Args:
        inp: [rows, hidden] float32, float16 or bfloat16, the experts' outputs for the permuted
            rows.
        row_id_map: as returned by the function that permuted the tokens.
        merging_probs: [tokens, experts] for "mask", [tokens, k] for "index", float32 or the dtype
            of ``inp``; None adds the rows unweighted.
        restore_shape, pad_offsets: not needed, because ``row_id_map`` contains them; only checked.
        map_type: "mask" or "index", as given to the function that permuted.
        probs: earlier name of ``merging_probs``.

    Returns:
        [tokens, hidden] in the dtype of ``inp``; zeros for a token without rows.

    Raises:
        TypeError: both ``merging_probs`` and ``probs`` are given.
    """
    if probs is not None:
        if merging_probs is not None:
            raise TypeError(
                "moe_unpermute: probs must be None beside merging_probs, whose earlier name it is, "
                "got both"
            )
        merging_probs = probs
    return _permutation.moe_unpermute(
        inp, row_id_map, merging_probs, restore_shape, map_type, pad_offsets
    )
