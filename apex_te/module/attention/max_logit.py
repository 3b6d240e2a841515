"""Largest logit of each head, ``scale * q k^T + bias`` before the softmax, as QK-clip needs it.

None of PyTorch's kernels returns it: this is a pass of its own over queries and keys, one of the
seven GEMMs of attention's forward and backward.
"""

from __future__ import annotations

import torch

from .masks import Visibility, band

_MOST_SCORES = 2**26  # of one block of queries: 128 MiB of bf16


@torch.no_grad()
def max_logit(
    q: torch.Tensor,
    k: torch.Tensor,
    bias: torch.Tensor | None,
    seen: Visibility,
    scale: float,
) -> torch.Tensor:
    """Returns the largest logit of visible keys, [h] in the dtype of ``q``; -inf without any.

    Args:
        q, k: queries [b, h, sq, d] and keys [b, g, sk, d].
        bias: broadcasts to [b, h, sq, sk].
        seen: which keys a query sees; must not be ``packed``.
    """
    batch, heads, queries, _ = q.shape
    groups, keys = k.shape[1:3]
    found = q.new_full((heads,), -torch.inf)
    if not (batch and queries and keys):
        return found
    offset = 0 if seen.causal == "upper_left" else keys - queries
    left, right = (-1, -1 if seen.causal is None else 0) if seen.window is None else seen.window
    block = max(_MOST_SCORES // (batch * heads * keys), 1)
    for begin in range(0, queries, block):
        end = min(begin + block, queries)
        first = 0 if left < 0 else max(begin + offset - left, 0)
        last = keys if right < 0 else min(end + offset + right, keys)
        if first >= last:
            continue
        part = slice(begin, end), slice(first, last)
        rows = q[:, :, begin:end].unflatten(1, (groups, -1)).flatten(2, 3)
        scores = rows @ k[:, :, first:last].mT
        scores = scores.unflatten(2, (heads // groups, -1)).flatten(1, 2) * scale
        if bias is not None:
            scores = scores + _block_of(bias, part)
        if left >= 0 or right >= 0:
            to = begin + offset - first
            hidden = band(end - begin, last - first, to, left, right, q.device)
            scores = scores.masked_fill(hidden, -torch.inf)
        if seen.hidden is not None:
            scores = scores.masked_fill(_block_of(seen.hidden, part), -torch.inf)
        if seen.fully_masked_queries is not None:
            rows_hidden = _block_of(seen.fully_masked_queries, part)
            scores = scores.masked_fill(rows_hidden, -torch.inf)
        found = torch.maximum(found, scores.amax((0, 2, 3)))
    return found


def _block_of(x: torch.Tensor, part: tuple[slice, slice]) -> torch.Tensor:
    """Returns one block of a tensor that broadcasts to scores [b, h, sq, sk]."""
    for dim, each in zip((2, 3), part, strict=True):
        if x.shape[dim] > 1:
            x = x[(slice(None),) * dim + (each,)]
    return x
