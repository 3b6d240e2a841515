"""Attention of a rank's tokens to gathered keys, by kernels that return the log-sum-exp.

Each piece of it is a call of a kernel, as large and as regular as the order of tokens allows. The
first piece needs this rank's keys alone, so that it runs while those of others arrive. Results of
pieces are joined by their log-sum-exps, in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ....ops.attention_sink import attention_join, attention_sink_bwd, attention_sink_fwd
from ....ops.binding import OpFunction, once_differentiable
from ..kernels import KERNELS, Call, Extra, Result, like
from ..masks import band
from .meeting import Meeting, Span


class Piece(NamedTuple):
    """Queries of a rank, and keys that they see.

    Attributes:
        queries: first and last + 1 of this rank's tokens.
        keys: the same of the keys of all ranks, by rank.
        is_own: the keys are all of this rank's.
        is_first: no piece before has these queries.
        causal, window: of the kernel; both are aligned at the last query and key.
        packed: numbers of queries and of keys of parts that do not see each other.
    """

    queries: Span
    keys: tuple[Span, ...]
    is_own: bool = False
    is_first: bool = True
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    packed: tuple[tuple[int, int], ...] = ()


def pieces_of(
    rank: int, ranks: int, queries: int, keys: int, causal: bool, window: tuple[int, int] | None
) -> tuple[Piece, ...]:
    """Returns the pieces of a rank's attention.

    Args:
        queries, keys: numbers of this rank's tokens; equal if a mask is causal or has a window.
        window: (left, right), instead of ``causal``; -1 or None = unlimited.
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
        spans: list[Span] = []
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


def packed_piece(pieces: tuple[Piece, ...], batch: int) -> tuple[Piece, ...]:
    """Returns the pieces of a window as one if a packed call can compute them, else as they are.

    It writes the results of all queries in place, which those of several calls would be copied to.
    """
    if batch > 1 or len({piece.window for piece in pieces}) > 1:
        return pieces
    counts = tuple(
        (piece.queries[1] - piece.queries[0], sum(b - a for a, b in piece.keys)) for piece in pieces
    )
    keys = tuple(span for piece in pieces for span in piece.keys)
    queries = (pieces[0].queries[0], pieces[-1].queries[1])
    is_own = all(piece.is_own for piece in pieces)
    return (Piece(queries, keys, is_own, window=pieces[0].window, packed=counts),)


def attend_in_pieces(
    meeting: Meeting,
    pieces: tuple[Piece, ...],
    kernels: tuple[str, ...],
    scale: float,
    has_sink: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """Attends; all tensors have this rank's tokens.

    Args:
        meeting: exchange of keys, to whose rows the pieces refer.
        kernels: name in ``KERNELS`` for each piece.
        q, k, v: [b, h, s, d], tokens in the order of ranks' chunks.
        sink: float32 [h], or None for 0, with ``has_sink``.
    """
    out: torch.Tensor = _Pieces.apply(q, k, v, sink, meeting, pieces, kernels, scale, has_sink)
    return out


class _Keys:
    """Keys and values of all ranks, which arrive while this rank's are used."""

    def __init__(self, meeting: Meeting, k: torch.Tensor, v: torch.Tensor) -> None:
        self._own, self._sizes, self._first = (k, v), (k.shape[3], v.shape[3]), meeting.own_start
        rows = torch.cat([x.permute(2, 0, 1, 3) for x in (k, v)], -1)  # [s, b, g, d + dv]
        self._arriving = meeting.begin(rows)
        self._all: torch.Tensor | None = None

    def of(self, piece: Piece) -> tuple[torch.Tensor, ...]:
        """Returns keys and values [b, g, s, d] of a piece."""
        if piece.is_own:
            return tuple(
                _joined([x[:, :, a - self._first : b - self._first] for a, b in piece.keys], 2)
                for x in self._own
            )
        rows = self.all()
        rows = _joined([rows[a:b] for a, b in piece.keys], 0)
        return rows.permute(1, 2, 0, 3).split(self._sizes, -1)

    def all(self) -> torch.Tensor:
        """Returns the rows of the meeting, keys beside values, [rows, b, g, d + dv]."""
        if self._all is None:
            self._all = self._arriving()
        return self._all


def _joined(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _call(
    piece: Piece, kernel: str, scale: float, q: torch.Tensor, k: torch.Tensor
) -> tuple[Extra, Call]:
    """Returns the arguments of a kernel for a piece with queries q and keys k."""
    if piece.packed:
        counts = tuple(zip(*piece.packed, strict=True))
        starts, key_starts = (_starts(each, q.device) for each in counts)
        extra = Extra(starts=starts, key_starts=key_starts)
        longest = (max(counts[0]), max(counts[1]))
        return extra, Call(scale, window=piece.window, longest=longest, is_full=True)
    if piece.window == (-1, -1):
        return Extra(), Call(scale, piece.causal)
    if kernel == "flash":
        return Extra(), Call(scale, window=piece.window)
    queries, keys = q.shape[2], k.shape[2]
    outside = band(queries, keys, keys - queries, *piece.window, q.device)
    mask = torch.zeros_like(outside, dtype=q.dtype).masked_fill_(outside, -torch.inf)
    return Extra(mask), Call(scale)


def _starts(counts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Returns where parts of such lengths begin and end, without a copy from the host."""
    found = torch.zeros(len(counts) + 1, dtype=torch.int32, device=device)
    for number, count in enumerate(counts):
        found[number + 1 :] += count
    return found


class _Pieces(OpFunction):
    LABEL = "DotProductAttention"

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None,
        meeting: Meeting, pieces: tuple[Piece, ...], kernels: tuple[str, ...], scale: float,
        has_sink: bool,
    ) -> torch.Tensor:  # fmt: skip
        keys = _Keys(meeting, k, v)
        found = []
        for piece, kernel in zip(pieces, kernels, strict=True):
            part = q[:, :, slice(*piece.queries)]
            own, values = keys.of(piece)
            extra, call = _call(piece, kernel, scale, part, own)
            found.append(KERNELS[kernel].forward(part, own, values, extra, call))
        keys.all()  # of which a rank may need nothing, but must take part
        out, lse = _joined_results(pieces, found)
        if has_sink:
            out, lse = attention_sink_fwd(out, lse, sink, out=out)
        ctx.given = meeting, pieces, kernels, scale
        states = [each.state for each in found]
        ctx.numbers = [tuple(x if isinstance(x, int) else None for x in state) for state in states]
        tensors = [x for state in states for x in state if not isinstance(x, int)]
        ctx.save_for_backward(q, k, v, sink, out, lse, *tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        meeting, pieces, kernels, scale = ctx.given
        q, k, v, sink, out, lse, *tensors = ctx.saved_tensors
        keys = _Keys(meeting, k, v)
        kept = iter(tensors)
        grad = like(grad, out)
        dsink = attention_sink_bwd(grad, out, lse, sink) if ctx.needs_input_grad[3] else None
        sizes = (k.shape[3], v.shape[3])
        sums = k.new_empty((meeting.rows, *k.shape[:2], sum(sizes)))
        is_joint, parts = _is_joint(pieces), []
        # The pieces and parts of windows have keys in common.
        is_once = is_joint and not any(piece.packed for piece in pieces)
        for a, b in _unseen(pieces, meeting.rows) if is_once else [(0, meeting.rows)]:
            sums[a:b].zero_()
        for piece, kernel, numbers in zip(pieces, kernels, ctx.numbers, strict=True):
            state = tuple(next(kept) if x is None else x for x in numbers)
            rows = slice(*piece.queries)
            own, values = keys.of(piece)
            extra, call = _call(piece, kernel, scale, q[:, :, rows], own)
            dq, *dkv = KERNELS[kernel].backward(
                grad[:, :, rows], q[:, :, rows], own, values, out[:, :, rows],
                lse[:, :, rows].contiguous(), state, extra, call,
            )  # fmt: skip
            parts.append(dq)
            first = 0
            for a, b in piece.keys:
                rows = slice(first, first + b - a)
                for x, dx in zip(sums[a:b].split(sizes, -1), dkv, strict=True):
                    dx = dx[:, :, rows].permute(2, 0, 1, 3)
                    x.copy_(dx) if is_once else x.add_(dx)
                first += b - a
        keys.all()
        dkv = meeting.give_back(sums).permute(1, 2, 0, 3)
        if len(parts) == 1:
            (dq,) = parts
        elif is_joint:
            # A sum of two parts is rounded once without a float32 copy.
            wide = parts[0] if len(parts) == 2 else parts[0].float()
            for piece, part in zip(pieces[1:], parts[1:], strict=True):
                wide[:, :, slice(*piece.queries)] += part
            dq = wide.to(q.dtype)
        else:
            dq = _stacked(parts)
        return dq, *dkv.split(sizes, -1), dsink, None, None, None, None, None


def _stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    """Returns [b, h, s, d] of parts of the tokens, with tokens first in memory."""
    return torch.cat([x.permute(2, 0, 1, 3) for x in parts]).permute(1, 2, 0, 3)


def _is_joint(pieces: tuple[Piece, ...]) -> bool:
    """Returns True if the first piece has all queries, to whose results those of others add."""
    return all(piece.is_first == (number == 0) for number, piece in enumerate(pieces))


def _unseen(pieces: tuple[Piece, ...], rows: int) -> list[Span]:
    """Returns which of ``rows`` keys no piece has; pieces have none in common."""
    found, last = [], 0
    for a, b in sorted(span for piece in pieces for span in piece.keys):
        if last < a:
            found.append((last, a))
        last = b
    return [*found, (last, rows)] if last < rows else found


def _joined_results(
    pieces: tuple[Piece, ...], found: list[Result]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns output and log-sum-exp of all queries and keys, from those of the pieces."""
    if not _is_joint(pieces):
        return _stacked([each.out for each in found]), torch.cat([each.lse for each in found], 2)
    first, *others = found
    if not others:
        return first.out, first.lse
    # The others have all queries, or the last ones.
    return attention_join(*first[:2], *(x for each in others for x in each[:2]), out=first.out)
