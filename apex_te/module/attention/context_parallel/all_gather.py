"""Attention of a rank's tokens to the keys of all ranks: by masks, packed or without padding.

What ``pieces`` cannot compute: here autograd joins functions that know nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ....ops.binding import OpFunction
from ..backends import attend
from ..candidates import Options, Path
from ..choice import choose, packs
from ..masks import MASK_TYPES, MaskType, Visibility, band
from ..packed import Packing, attend_packed, choose_packed, gaps_of
from ..places import shared
from .ranks import ContextRanks
from .split import PackedZigZag


class _Gather(OpFunction):
    """Rows of all ranks, by rank; the gradient is summed over them."""

    LABEL = "DotProductAttention"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: ContextRanks) -> torch.Tensor:
        ctx.ranks = ranks
        return ranks.gather(x).wait()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Sum.apply(grad, ctx.ranks), None


class _Sum(OpFunction):
    """This rank's rows of a sum over ranks; the gradient of ``_Gather``."""

    LABEL = "DotProductAttention"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: ContextRanks) -> torch.Tensor:
        ctx.ranks = ranks
        return ranks.sum_parts(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Gather.apply(grad, ctx.ranks), None


def gather_rows(
    ranks: ContextRanks, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns keys and values [tokens, .., d] of all ranks, by rank, with a summed gradient."""
    both = _Gather.apply(torch.cat((k, v), -1), ranks)
    keys, values = both.split((k.shape[-1], v.shape[-1]), -1)
    return keys, values


def rows_of(x: torch.Tensor | None, ranks: ContextRanks, size: int) -> torch.Tensor | None:
    """Returns the rows [.., queries of this rank, ..] of what broadcasts to whole scores."""
    if x is None or x.shape[2] == 1:
        return x
    return torch.cat([x.narrow(2, chunk * size, size) for chunk in ranks.chunks], 2)


def seen_by_rank(
    seen: Visibility, ranks: ContextRanks, queries: int, keys: int, device: torch.device
) -> Visibility:
    """Returns what this rank's queries see, from what all see of whole sequences."""
    size = queries // (2 * ranks.size)
    hidden = rows_of(seen.hidden, ranks, size)
    left, right = seen.window or (-1, -1 if seen.causal is None else 0)
    if left >= 0 or right >= 0:
        aligned = seen.window is not None or seen.causal == "bottom_right"
        first = keys - queries if aligned else 0
        chunks = [
            band(size, keys, first + chunk * size, left, right, device) for chunk in ranks.chunks
        ]
        outside = torch.cat(chunks, 2)
        hidden = outside if hidden is None else hidden | outside
    return Visibility(
        hidden=hidden, fully_masked_queries=rows_of(seen.fully_masked_queries, ranks, size)
    )


def without_padding(
    seen: Visibility,
    ranks: ContextRanks,
    options: Options,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> tuple[Path, list[Visibility]] | None:
    """Returns the path of this rank's queries and what equal parts of them see, if that packs them.

    It does if ``seen`` hides padded tokens, and of causal attention later ones, and nothing else.

    Args:
        q: this rank's, [b, h, s, d].
        k, v: of whole sequences.
    """
    padded, keys = seen.fully_masked_queries, seen.hidden
    if padded is None or keys is None or keys.shape[2] > 1 or not packs(q, k, v, options):
        return None
    if seen.causal is None:
        queries = rows_of(padded, ranks, q.shape[2] // 2)
        assert queries is not None
        parts = [Visibility(window=(-1, -1), packed=(queries.mT, keys))]
    elif seen.padded is None:  # then the last query may not be the last key
        return None
    else:
        masks = shared(_chunk_masks, seen.padded, *ranks.chunks, q.shape[2] // 2)
        parts = [Visibility(window=(-1, 0), packed=pair) for pair in masks]
    return choose(q, k, v, parts[0], None, options), parts


def _chunk_masks(
    padded: torch.Tensor, first: int, second: int, size: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns masks of two chunks' queries that are padded, and of keys, too, or after the chunk.

    Without these tokens, the last query of a chunk is the last key.
    """
    place = torch.arange(padded.shape[3], device=padded.device)
    return [
        (padded[..., n * size : (n + 1) * size], padded | (place >= (n + 1) * size))
        for n in (first, second)
    ]


def attend_by_parts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    path: Path,
    parts: list[Visibility],
    options: Options,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """Attends with equal parts of the queries, each of which sees other keys."""
    found = [
        attend(each, k, v, None, path, seen, options, sink=sink)
        for each, seen in zip(q.chunk(len(parts), 2), parts, strict=True)
    ]
    return found[0] if len(found) == 1 else torch.cat(found, 2)


def packed_attention(
    owner: str,
    ranks: ContextRanks,
    tokens: tuple[int, int],
    where: Packing,
    starts: tuple[torch.Tensor, torch.Tensor],
    kind: MaskType,
    size: tuple[int, int] | None,
    options: Options,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> tuple[Path, Callable[..., torch.Tensor]]:
    """Returns the path and a function that attends within packed sequences.

    The two chunks of each sequence are sequences of two calls, which see the keys up to their last
    query, or all.

    Args:
        tokens: this rank's numbers of queries and of keys.
        where: lengths of the whole sequences.
        starts: int32 [n + 1], where they begin, for queries and for keys.
    """
    queries, keys = tokens
    lengths, key_lengths = where.queries.diff(), where.keys.diff()
    chunk_sizes = starts[0].diff() // (2 * ranks.size)
    inner = MASK_TYPES["padding_causal_bottom_right" if kind.causal else "padding"]
    calls = []
    for half, chunk in enumerate(ranks.chunks):
        first = chunk_sizes * chunk
        count = torch.minimum((lengths - first).clamp(min=0), chunk_sizes)
        visible = first + count if kind.causal else key_lengths
        visible = visible * (count > 0)
        part = Packing(_ends(count), _ends(visible), where.longest_query, where.longest_key)
        at = starts[0] // ranks.size
        at = torch.cat((at[:-1] + half * chunk_sizes, at[-1:]))
        gaps = (
            gaps_of(owner, "q", part.queries, at, queries),
            gaps_of(owner, "kv", part.keys, starts[1], keys * ranks.size),
        )
        calls.append((part, gaps))
    path = choose_packed(q, k, v, calls[0][0], inner, None, False, options)
    order = PackedZigZag(ranks.size, starts[1], keys * ranks.size)

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, sink: Any
    ) -> torch.Tensor:
        k, v = (order.whole(x) for x in gather_rows(ranks, k, v))
        parts = [
            attend_packed(
                q, k, v, None, path, owner, part, inner, size, options, None, False, False, gaps,
                sink,
            )
            for part, gaps in calls
        ]  # fmt: skip
        return parts[0] + parts[1]

    return path, run


def _ends(lengths: torch.Tensor) -> torch.Tensor:
    """Returns int32 [n + 1], where sequences of these lengths begin and end."""
    return torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).to(torch.int32)
