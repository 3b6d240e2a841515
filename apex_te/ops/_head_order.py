"""Copies of rows or features that are heads, from one order of the heads to another."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def sorted_heads(x: torch.Tensor, *, repeats: int, groups: int) -> torch.Tensor:
    """Returns a copy of rows of heads, by group, as all queries, all keys, all values."""
    heads, queries = groups * (repeats + 2), groups * repeats
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, to = in_words((x.contiguous(), out))
    rows, to = rows.view(groups, repeats + 2, -1), to.view(heads, -1)
    to[:queries].view(groups, repeats, -1).copy_(rows[:, :repeats])
    to[queries:].view(2, groups, -1).copy_(rows[:, repeats:].transpose(0, 1))
    return out


def in_words(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns views with 8-byte elements, which a GPU copies faster, or else the given tensors.

    Views are returned if the strides, offsets and last dimensions of all tensors allow them.
    """
    per_word = 8 // tensors[0].element_size()
    if all(
        t.stride(-1) == 1
        and not any(n % per_word for n in (t.storage_offset(), t.shape[-1], *t.stride()[:-1]))
        for t in tensors
    ):
        return [t.view(torch.int64) for t in tensors]
    return list(tensors)
