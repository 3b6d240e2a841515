"""Order of tokens on context-parallel ranks: 2 chunks of each sequence's 2 x ranks, as in zig-zag.

Rank r has chunks r and 2 ranks - 1 - r, so that under a causal mask all ranks have the same work.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from ..places import Places
from .ranks import ContextRanks

__all__ = ["join_context_parallel", "split_for_context_parallel"]

_Batch = TypeVar("_Batch", torch.Tensor, dict[str, Any])


class ZigZag:
    """Order of the tokens of unpacked sequences over ``ranks`` ranks, in dimension 0."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """Returns tokens [s, ..] in the order of the sequence, from those of all ranks by rank."""
        chunks = x.chunk(2 * self.ranks)
        return torch.cat((*chunks[::2], *reversed(chunks[1::2])))

    def by_rank(self, x: torch.Tensor) -> torch.Tensor:
        """Returns tokens [s, ..] by rank, from those in the order of the sequence."""
        chunks = x.chunk(2 * self.ranks)
        pairs = zip(chunks[: self.ranks], reversed(chunks[self.ranks :]), strict=True)
        return torch.cat([chunk for pair in pairs for chunk in pair])


class PackedZigZag:
    """Order of the tokens of packed sequences, each of which is split over ``ranks`` ranks.

    Args:
        starts: int32 [n + 1], where the whole sequences begin and end; 2 x ranks divides lengths.
        tokens: number of tokens of all ranks; those of no sequence become zeros.
    """

    def __init__(self, ranks: int, starts: torch.Tensor, tokens: int) -> None:
        device = starts.device
        place = torch.arange(tokens, dtype=torch.int32, device=device)
        own = (torch.searchsorted(starts, place, right=True) - 1).clamp(0, len(starts) - 2)
        size = ((starts[own + 1] - starts[own]) // (2 * ranks)).clamp(min=1)
        offset = place - starts[own]
        chunk = offset // size
        rank = torch.minimum(chunk, 2 * ranks - 1 - chunk)
        row = rank * (tokens // ranks) + starts[own] // ranks + offset % size
        row += (chunk >= ranks) * size
        none = (place < starts[0]) | (place >= starts[-1]) | (row < 0) | (row >= tokens)
        row = row.masked_fill(none, tokens)
        back = torch.full((tokens + 1,), -1, dtype=torch.int32, device=device)
        back = back.scatter(0, row.long(), place)[:-1]
        self.places = Places(row.int().masked_fill(none, -1), back)

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """Returns tokens [t, ..] in the order of the sequences, from those of all ranks by rank."""
        return self.places.close(x)[0]

    def by_rank(self, x: torch.Tensor) -> torch.Tensor:
        """Returns tokens [t, ..] by rank, from those in the order of the sequences."""
        return self.places.open(x)[0]


Order = ZigZag | PackedZigZag


def check_lengths(owner: str, name: str, starts: torch.Tensor, ranks: int, tokens: int) -> None:
    """Checks the lengths of whole packed sequences where they are on the CPU."""
    if starts.device.type != "cpu" or torch.compiler.is_compiling():
        return
    if starts[-1] > tokens or (starts.diff() % (2 * ranks)).any():
        raise ValueError(
            f"{owner}: {name} must have sequences of multiples of {2 * ranks} tokens (2 x the "
            f"context-parallel ranks), {tokens} in all, got {starts.tolist()}"
        )


def split_for_context_parallel(
    batch: _Batch, cp_group: Any, dim: int = 1, cu_seqlens: torch.Tensor | None = None
) -> _Batch:
    """Returns this rank's tokens of whole sequences, for context-parallel attention.

    Split everything that has an element per token with the same arguments: ids, labels, loss masks,
    position ids. With n ranks, rank r gets chunks r and 2n - 1 - r of the 2n equal chunks of each
    sequence.

    Args:
        batch: tensor with all tokens in dimension ``dim``, or a dict of such tensors; values of
            other types are kept.
        cp_group: process group of the ranks, as in ``DotProductAttention``.
        dim: dimension of the tokens.
        cu_seqlens: for packed sequences, int32 [n + 1], where they begin and end, padding included;
            None splits ``dim`` as one sequence.

    Returns:
        Tensor with ``1 / n`` of the tokens, or a dict of such tensors.

    Raises:
        TypeError: ``cp_group`` is not a process group, or ``cu_seqlens`` is not int32.
        ValueError: the length of a sequence is not a multiple of 2n.

    Source: order of tokens of TransformerEngine's and Megatron-LM's context parallelism.
    """
    owner = "split_for_context_parallel"
    ranks = ContextRanks(owner, cp_group, comm_type="a2a+p2p")
    if isinstance(batch, dict):
        return {
            name: _split(owner, x, ranks, dim, cu_seqlens) if isinstance(x, torch.Tensor) else x
            for name, x in batch.items()
        }
    return _split(owner, batch, ranks, dim, cu_seqlens)


def _split(
    owner: str, x: torch.Tensor, ranks: ContextRanks, dim: int, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    if ranks.size == 1:
        return x
    tokens = x.shape[dim]
    if tokens % (2 * ranks.size):
        raise ValueError(
            f"{owner}: batch must have a multiple of {2 * ranks.size} tokens (2 x the "
            f"context-parallel ranks) in dimension {dim}, got {list(x.shape)}"
        )
    if cu_seqlens is None:
        chunks = x.chunk(2 * ranks.size, dim)
        return torch.cat([chunks[number] for number in ranks.chunks], dim)
    own = own_tokens(owner, cu_seqlens, tokens, ranks.size, ranks.rank)
    return x.index_select(dim, own.to(x.device))


def own_tokens(
    owner: str, cu_seqlens: torch.Tensor, tokens: int, ranks: int, rank: int
) -> torch.Tensor:
    """Returns which of all packed tokens a rank has, int32 [tokens / ranks].

    It is 0 for those that belong to no sequence.
    """
    if cu_seqlens.dtype is not torch.int32:
        raise TypeError(f"{owner}: cu_seqlens must be an int32 tensor, got {cu_seqlens.dtype}")
    check_lengths(owner, "cu_seqlens", cu_seqlens, ranks, tokens)
    order = PackedZigZag(ranks, cu_seqlens, tokens)
    own = tokens // ranks
    return order.places.opening.narrow(0, rank * own, own).clamp(min=0)


def join_context_parallel(
    x: torch.Tensor, cp_group: Any, dim: int = 1, cu_seqlens: torch.Tensor | None = None
) -> torch.Tensor:
    """Gathers whole sequences from the tokens of each rank, without a gradient; collective.

    It is the inverse of ``split_for_context_parallel``, for results such as logits.

    Args:
        x: tensor of this rank's tokens, with equal shapes on all ranks.
        cp_group, dim, cu_seqlens: as passed to ``split_for_context_parallel``. Tokens outside the
            sequences are 0.

    Returns:
        Tensor with all tokens in dimension ``dim``.

    Raises:
        TypeError: ``cp_group`` is not a process group, or ``cu_seqlens`` is not int32.
        ValueError: the length of a sequence is not a multiple of 2n.

    Source: order of tokens of TransformerEngine's and Megatron-LM's context parallelism.
    """
    owner = "join_context_parallel"
    ranks = ContextRanks(owner, cp_group, comm_type="a2a+p2p")
    x = x.detach()
    if ranks.size == 1:
        return x
    rows = ranks.gather(x.movedim(dim, 0)).wait()
    if cu_seqlens is None:
        return ZigZag(ranks.size).whole(rows).movedim(0, dim)
    if cu_seqlens.dtype is not torch.int32:
        raise TypeError(f"{owner}: cu_seqlens must be an int32 tensor, got {cu_seqlens.dtype}")
    check_lengths(owner, "cu_seqlens", cu_seqlens, ranks.size, rows.shape[0])
    source = PackedZigZag(ranks.size, cu_seqlens, rows.shape[0]).places.closing.to(x.device)
    none = (source < 0).view(-1, *(1,) * (rows.dim() - 1))
    return rows.index_select(0, source.clamp(min=0)).masked_fill(none, 0).movedim(0, dim)
