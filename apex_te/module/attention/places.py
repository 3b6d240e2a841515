"""Tokens moved in memory: gaps between packed sequences closed, padding put behind a sequence."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ...ops.binding import OpFunction
from ...ops.moe_permute import sort_chunks
from ...runtime.tracing import is_traced


class Places(NamedTuple):
    """Two layouts of the same tokens in memory, with and without gaps.

    ``rows``, int32 [2, t], has the position with gaps of each position without, and the other way
    around; -1 where there is no token.
    """

    rows: torch.Tensor

    def close(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the tokens of ``x`` [t, ...] without gaps, zeros behind them."""
        return self._move(x, False)

    def open(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the tokens of ``x`` [t, ...] with gaps of zeros."""
        return self._move(x, True)

    def _move(self, x: torch.Tensor, back: bool) -> torch.Tensor:
        if not x.numel():
            return x
        moved: torch.Tensor = _Moved.apply(x.flatten(1), self.rows, back)
        return moved.view(x.shape)


class _Moved(OpFunction):
    """Rows in other places, zeros where none comes; the gradient moves back, without a sum."""

    LABEL = "DotProductAttention"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor, back: bool) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.back = back
        if x.dtype is torch.float64:  # which the op does not take, and only moves
            return sort_chunks(x.contiguous().view(torch.float32), rows, is_backward=back)[0].view(
                torch.float64
            )
        return sort_chunks(x, rows, is_backward=back)[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Moved.apply(grad, ctx.saved_tensors[0], not ctx.back), None, None


class Packed(NamedTuple):
    """Tokens of a batch without padded ones: where they lie, and where sequences begin and end.

    ``starts`` is int32 [batch + 1].
    """

    places: Places
    starts: torch.Tensor


def padding_behind(padded: torch.Tensor, batch: int, sequence_first: bool) -> Places:
    """Returns the places of tokens that move padded ones after the others, which keep their order.

    Args:
        padded: bool [batch or 1, 1, 1, s], True for padded tokens.
        batch: number of sequences.
        sequence_first: tokens are [s, batch] in memory, not [batch, s].
    """
    found: Places = shared(_padding_behind, padded, batch, sequence_first)
    return found


def without_padding(padded: torch.Tensor, batch: int, sequence_first: bool) -> Packed:
    """Returns the packed tokens of all sequences; see ``padding_behind``."""
    found: Packed = shared(_without_padding, padded, batch, sequence_first)
    return found


# Masks of queries and of keys, of an encoder and of a decoder; with context-parallel ranks also
# of two chunks, which come from a mask themselves.
_MOST_SHARED = 8
_made: list[tuple[weakref.ref, tuple[Any, ...], Any]] = []


def shared(make: Callable[..., Any], padded: torch.Tensor, *options: Any) -> Any:
    """Returns ``make(padded, *options)``, of an earlier call if ``padded`` is unchanged since."""
    shareable = not (is_traced() or torch.compiler.is_compiling() or padded.is_inference())
    if shareable and padded.is_cuda:
        # A captured graph keeps no memory of others, and its mask may change between replays.
        shareable = not torch.cuda.is_current_stream_capturing()
    if not shareable:
        return make(padded, *options)
    key = (make, padded._version, *options)
    for mask, other, found in _made:
        if mask() is padded and other == key:
            return found
    made = make(padded, *options)
    _made[:] = [(weakref.ref(padded), key, made), *_made[: _MOST_SHARED - 1]]
    return made


def _padding_behind(padded: torch.Tensor, batch: int, sequence_first: bool) -> Places:
    padded = padded.flatten(1).expand(batch, -1)
    behind, order = padded.sort(dim=1, stable=True)
    rank = padded.logical_not().cumsum(1) - 1
    first = torch.arange(batch, device=padded.device)[:, None]
    tokens = padded.shape[1]

    def rows(at: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        at = at * batch + first if sequence_first else first * tokens + at
        at = at.masked_fill(hidden, -1).int()
        return (at.t() if sequence_first else at).flatten()

    return Places(torch.stack((rows(order, behind), rows(rank, padded))))


def _without_padding(padded: torch.Tensor, batch: int, sequence_first: bool) -> Packed:
    padded = padded.flatten(1).expand(batch, -1)
    behind, order = padded.flatten().sort(stable=True)
    if sequence_first:  # from the place of [batch, s] to that of [s, batch]
        tokens = padded.shape[1]
        order = order % tokens * batch + order // tokens
    kept = padded.logical_not()
    rank = (kept.flatten().cumsum(0) - 1).masked_fill(padded.flatten(), -1).view(padded.shape)
    rank = (rank.t() if sequence_first else rank).flatten()
    rows = torch.stack((order.masked_fill(behind, -1), rank)).int()
    starts = functional.pad(kept.sum(1).cumsum(0), (1, 0)).int()
    return Packed(Places(rows), starts)
