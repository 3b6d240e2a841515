"""Attention of a rank's tokens to gathered keys, by kernels that return the log-sum-exp.

Each piece of it is a call of a kernel, as large and as regular as the order of tokens allows. The
first piece needs this rank's keys alone, so that it runs while those of others arrive. Results of
pieces are joined by their log-sum-exps, in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ....ops.attention_sink import attention_sink_bwd, attention_sink_fwd
from ....ops.binding import OpFunction, once_differentiable
from ..kernels import KERNELS, Call, Extra, like
from ..masks import band
from .ranks import ContextRanks

_Span = tuple[int, int]


class Piece(NamedTuple):
    """Queries of a rank, and keys that they see.

    Attributes:
        queries: first and last + 1 of this rank's tokens.
        keys: the same of the gathered tokens, by rank.
        is_own: the keys are all of this rank's.
        is_first: no piece before has these queries.
        causal, window: of the kernel; both are aligned at the last query and key.
    """

    queries: _Span
    keys: tuple[_Span, ...]
    is_own: bool = False
    is_first: bool = True
    causal: bool = False
    window: tuple[int, int] = (-1, -1)


def pieces_of(
    rank: int, ranks: int, queries: int, keys: int, causal: bool, window: tuple[int, int] | None
) -> tuple[Piece, ...]:
    """Returns the pieces of a rank's attention.

    Args:
        queries, keys: numbers of this rank's tokens; equal if a mask is causal or has a window.
        window: (left, right), -1 = no limit, instead of ``causal``; None has no limits.
    """
    if window is not None:
        return _windowed(rank, ranks, queries // 2, window)
    own = Piece((0, queries), ((rank * keys, (rank + 1) * keys),), True, causal=causal)
    before, behind = (0, rank * keys), ((rank + 1) * keys, ranks * keys)
    if not causal:
        others = [Piece((0, queries), (span,), False, False) for span in (before, behind)]
    else:
        # All see the first chunks of the ranks before; of those behind only the second chunk does.
        half = keys // 2
        firsts = tuple((r * keys, r * keys + half) for r in range(rank))
        others = [
            Piece((0, queries), firsts, False, False),
            Piece((queries // 2, queries), (behind,), False, False),
        ]
    return (own, *(each for each in others if any(a < b for a, b in each.keys)))


def _windowed(rank: int, ranks: int, size: int, window: tuple[int, int]) -> tuple[Piece, ...]:
    """Returns one piece for each of the rank's two chunks, of ``size`` tokens."""
    left, right = window
    end = 2 * ranks * size
    found = []
    for half, chunk in enumerate((rank, 2 * ranks - 1 - rank)):
        start, stop = chunk * size, (chunk + 1) * size
        low = 0 if left < 0 else max(start - left, 0)
        high = end if right < 0 else min(stop + right, end)
        spans: list[_Span] = []
        for number in range(low // size, -(-high // size)):
            owner, second = min(number, 2 * ranks - 1 - number), number >= ranks
            shift = (2 * owner + second - number) * size
            a, b = max(number * size, low) + shift, min((number + 1) * size, high) + shift
            if spans and spans[-1][1] == a:
                a = spans.pop()[0]
            spans.append((a, b))
        # The kernel counts from the last key, which is ``more`` tokens behind the last query.
        more = high - stop
        limits = (-1 if left < 0 else left + more, -1 if right < 0 else right - more)
        is_own = all(2 * rank * size <= a and b <= 2 * (rank + 1) * size for a, b in spans)
        keys = tuple(spans)
        found.append(Piece((half * size, (half + 1) * size), keys, is_own, window=limits))
    return tuple(found)


def attend_in_pieces(
    ranks: ContextRanks,
    pieces: tuple[Piece, ...],
    kernel: str,
    scale: float,
    has_sink: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """Attends; all tensors have this rank's tokens.

    Args:
        kernel: name in ``KERNELS``.
        q, k, v: [b, h, s, d], tokens in the order of ranks' chunks.
        sink: float32 [h], or None for 0, with ``has_sink``.
    """
    out: torch.Tensor = _Pieces.apply(q, k, v, sink, ranks, pieces, kernel, scale, has_sink)
    return out


class _Keys:
    """Keys and values of all ranks, which are gathered while this rank's are used."""

    def __init__(self, ranks: ContextRanks, k: torch.Tensor, v: torch.Tensor) -> None:
        self._ranks, self._own, self._sizes = ranks, (k, v), (k.shape[3], v.shape[3])
        rows = torch.cat((k, v), -1).permute(2, 0, 1, 3)  # [s, b, g, d + dv]
        self._pending = ranks.gather(rows)
        self._all: torch.Tensor | None = None

    def of(self, piece: Piece) -> tuple[torch.Tensor, ...]:
        """Returns keys and values [b, g, s, d] of a piece."""
        if piece.is_own:
            first = self._ranks.rank * self._own[0].shape[2]
            found = []
            for x in self._own:
                parts = [x[:, :, a - first : b - first] for a, b in piece.keys]
                found.append(parts[0] if len(parts) == 1 else torch.cat(parts, 2))
            return tuple(found)
        rows = joined_rows(self.all(), piece.keys)
        return rows.permute(1, 2, 0, 3).split(self._sizes, -1)

    def all(self) -> torch.Tensor:
        """Returns keys beside values of all ranks, [tokens, b, g, d + dv] by rank."""
        if self._all is None:
            self._all = self._pending.wait()
        return self._all


def joined_rows(x: torch.Tensor, spans: tuple[_Span, ...]) -> torch.Tensor:
    """Returns the rows of ``x`` in some spans, a view if there is one."""
    parts = [x[a:b] for a, b in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _call(
    piece: Piece, kernel: str, scale: float, q: torch.Tensor, k: torch.Tensor
) -> tuple[Extra, Call]:
    """Returns the arguments of a kernel for a piece with queries q and keys k."""
    if piece.window == (-1, -1):
        return Extra(), Call(scale, piece.causal)
    if kernel == "flash":
        return Extra(), Call(scale, window=piece.window)
    queries, keys = q.shape[2], k.shape[2]
    outside = band(queries, keys, keys - queries, *piece.window, q.device)
    mask = torch.zeros_like(outside, dtype=q.dtype).masked_fill_(outside, -torch.inf)
    return Extra(mask), Call(scale)


class _Pieces(OpFunction):
    LABEL = "DotProductAttention"

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None,
        ranks: ContextRanks, pieces: tuple[Piece, ...], kernel: str, scale: float, has_sink: bool,
    ) -> torch.Tensor:  # fmt: skip
        gathered = _Keys(ranks, k, v)
        joins = not all(piece.is_first for piece in pieces)
        dtype = torch.float32 if joins else q.dtype
        out = torch.empty_like(q, dtype=dtype) if q.shape[3] == v.shape[3] else None
        if out is None:
            out = q.new_empty((q.shape[2], *q.shape[:2], v.shape[3]), dtype=dtype)
            out = out.permute(1, 2, 0, 3)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        states = []
        for piece in pieces:
            rows = slice(*piece.queries)
            part = q[:, :, rows]
            keys, values = gathered.of(piece)
            extra, call = _call(piece, kernel, scale, part, keys)
            found = KERNELS[kernel].forward(part, keys, values, extra, call)
            states.append(found.state)
            if piece.is_first:
                out[:, :, rows], lse[:, :, rows] = found.out, found.lse
            else:
                _join(out[:, :, rows], lse[:, :, rows], found.out, found.lse)
        gathered.all()  # of which a rank may need nothing, but must take part
        out = out.to(q.dtype)
        if has_sink:
            out, lse = attention_sink_fwd(out, lse, sink, out=out)
        ctx.given = ranks, pieces, kernel, scale
        ctx.states = [tuple(x if isinstance(x, int) else None for x in state) for state in states]
        tensors = [x for state in states for x in state if not isinstance(x, int)]
        ctx.save_for_backward(q, k, v, sink, out, lse, *tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        ranks, pieces, kernel, scale = ctx.given
        q, k, v, sink, out, lse, *tensors = ctx.saved_tensors
        gathered = _Keys(ranks, k, v)
        kept = iter(tensors)
        grad = like(grad, out)
        dsink = attention_sink_bwd(grad, out, lse, sink) if ctx.needs_input_grad[3] else None
        joins = not all(piece.is_first for piece in pieces)
        dq = torch.empty_like(q, dtype=torch.float32 if joins else q.dtype)
        # By rank, [tokens, b, g, d + dv].
        size = k.shape[3]
        sums = k.new_zeros((ranks.size * k.shape[2], *k.shape[:2], size + v.shape[3]))
        for piece, numbers in zip(pieces, ctx.states, strict=True):
            state = tuple(next(kept) if x is None else x for x in numbers)
            rows = slice(*piece.queries)
            keys, values = gathered.of(piece)
            extra, call = _call(piece, kernel, scale, q[:, :, rows], keys)
            parts = (x[:, :, rows] for x in (grad, q))
            dpart, dk, dv = KERNELS[kernel].backward(
                next(parts), next(parts), keys, values, out[:, :, rows],
                lse[:, :, rows].contiguous(), state, extra, call,
            )  # fmt: skip
            if piece.is_first:
                dq[:, :, rows] = dpart
            else:
                dq[:, :, rows] += dpart
            first = 0
            for a, b in piece.keys:
                to, part = sums[a:b].permute(1, 2, 0, 3), slice(first, first + b - a)
                # Only the pieces of windows have keys in common.
                for x, dx in ((to[..., :size], dk), (to[..., size:], dv)):
                    x.copy_(dx[:, :, part]) if joins else x.add_(dx[:, :, part])
                first += b - a
        gathered.all()
        dkv = ranks.sum_parts(sums).permute(1, 2, 0, 3)
        dk, dv = dkv.split((size, v.shape[3]), -1)
        return dq.to(q.dtype), dk, dv, dsink, None, None, None, None, None


def _join(out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> None:
    """Adds the result for further keys to that of some, float32, in place."""
    total = torch.logaddexp(lse, more_lse)
    out.mul_((lse - total).exp_()[..., None])
    out.addcmul_(more, (more_lse - total).exp_()[..., None])
    lse.copy_(total)
