"""Attention in blocks of one size, which gives a query the same bits whatever is computed with it.

Keys are taken in blocks from the first key on, and every GEMM has one shape. Blocks of hidden keys
add zeros, so that a query sees the same sums alone, with a cache, and within a whole sequence.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ...ops.gemm_common import float32_product

_QUERIES, _KEYS = 32, 64


def attend_in_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    sink: torch.Tensor | None,
    hidden: torch.Tensor | None,
    scale: float,
    has_sink: bool,
) -> torch.Tensor:
    """Computes attention [b, h, sq, dv]; 0 for queries that see no keys.

    Args:
        bias, hidden: broadcast to the scores [b, h, sq, sk]; hidden is True where masked out.
        sink: float32 [h]; None is 0 with ``has_sink``.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    batch, heads, queries, _ = q.shape
    repeats, size = heads // k.shape[1], v.shape[3]
    if not q.numel() or not k.numel():
        return q.new_zeros(batch, heads, queries, size)
    added = _added(hidden, bias, q, k, dtype)
    # A column of ones beside the values sums the weights, in the order of the values.
    values = torch.cat((v.to(dtype), v.new_ones(*v.shape[:3], 1, dtype=dtype)), -1)
    q_blocks, k_blocks = _cut(q.to(dtype) * scale, _QUERIES), _cut(k.to(dtype), _KEYS)
    v_blocks, made = _cut(values, _KEYS), []
    for b in range(batch):
        for h in range(heads):
            logit = None
            if has_sink:
                logit = q.new_zeros(1, dtype=dtype) if sink is None else sink[h : h + 1].to(dtype)
            some = added[min(b, added.shape[0] - 1), min(h, added.shape[1] - 1)]
            pairs = k_blocks[b, h // repeats], v_blocks[b, h // repeats]
            for rows, more in zip(q_blocks[b, h], some, strict=True):
                made.append(_rows(rows, *pairs, more, logit))
    out = torch.stack(made).view(batch, heads, -1, size)
    return out[:, :, :queries].to(q.dtype)


def _rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    added: torch.Tensor,
    logit: torch.Tensor | None,
) -> torch.Tensor:
    """Returns the outputs of one block of queries; ``v`` has a column of ones at its end."""
    scores = [float32_product(q, block.t()) + more for block, more in zip(k, added, strict=True)]
    # The factor exp(-largest) cancels, so it needs no gradient.
    largest = torch.stack([block.detach().amax(1) for block in scores]).amax(0)
    if logit is not None:
        largest = torch.maximum(largest, logit.detach())
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    total = q.new_zeros(q.shape[0], v.shape[2])
    for block, values in zip(scores, v, strict=True):
        total = total + float32_product((block - largest[:, None]).exp(), values)
    weight = total[:, -1]
    if logit is not None:
        weight = weight + (logit - largest).exp()
    return total[:, :-1] / weight.masked_fill(weight == 0, 1.0)[:, None]


def _cut(x: torch.Tensor, length: int) -> torch.Tensor:
    """Returns ``x`` [b, h, s, d] as blocks [b, h, n, length, d], filled with zeros."""
    x = functional.pad(x, (0, 0, 0, -x.shape[2] % length)).contiguous()
    return x.unflatten(2, (-1, length))


def _added(
    hidden: torch.Tensor | None,
    bias: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Returns what is added to the scores, [1 or b, 1 or h, query blocks, key blocks, 32, 64]."""
    queries, keys = q.shape[2], k.shape[2]
    added = torch.zeros(1, 1, queries, keys, dtype=dtype, device=q.device)
    if bias is not None:
        added = added + bias
    if hidden is not None:
        added = added.masked_fill(hidden, -torch.inf)
    added = functional.pad(added, (0, -keys % _KEYS), value=-torch.inf)
    added = functional.pad(added, (0, 0, 0, -queries % _QUERIES))
    added = added.unflatten(3, (-1, _KEYS)).unflatten(2, (-1, _QUERIES))
    return added.transpose(3, 4).contiguous()
