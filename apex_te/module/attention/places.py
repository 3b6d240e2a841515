"""Tokens moved in memory: gaps between packed sequences closed, padding put behind a sequence."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ...ops.binding import OpFunction
from ...ops.moe_permute import gather_rows
from ...runtime.tracing import is_traced


class Places(NamedTuple):
    """Two layouts of the same tokens in memory, with and without gaps.

    ``closing`` and ``opening``, int32, have for each position without gaps, and with them, the
    position of its token in the other layout; -1 where there is none.
    """

    closing: torch.Tensor
    opening: torch.Tensor

    def close(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the tokens of ``tensors`` [t, ...] without gaps, zeros behind them."""
        return _moved(self.closing, self.opening, tensors)

    def open(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the tokens of ``tensors`` [t, ...] with gaps of zeros."""
        return _moved(self.opening, self.closing, tensors)


def _moved(
    rows: torch.Tensor, back: torch.Tensor, tensors: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    found: tuple[torch.Tensor, ...] = _Moved.apply(rows, back, *tensors)
    return found


class _Moved(OpFunction):
    """Tokens in other places, zeros where none comes; the gradient moves back, without a sum."""

    LABEL = "DotProductAttention"

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, back: torch.Tensor, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(rows, back)
        return tuple(_rows(x, rows) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        rows, back = ctx.saved_tensors
        return None, None, *_Moved.apply(back, rows, *grads)


def _rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    shape = (rows.shape[0], *x.shape[1:])
    if not x.numel():
        return x.new_zeros(shape)
    x = x.flatten(1)
    if x.dtype is torch.float64:  # which the op does not take, and only moves
        return gather_rows(x.contiguous().view(torch.float32), rows).view(x.dtype).view(shape)
    return gather_rows(x, rows).view(shape)


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

    return Places(rows(order, behind), rows(rank, padded))


def _without_padding(padded: torch.Tensor, batch: int, sequence_first: bool) -> Packed:
    padded = padded.flatten(1).expand(batch, -1)
    behind, order = padded.flatten().sort(stable=True)
    if sequence_first:  # from the place of [batch, s] to that of [s, batch]
        tokens = padded.shape[1]
        order = order % tokens * batch + order // tokens
    kept = padded.logical_not()
    rank = (kept.flatten().cumsum(0) - 1).masked_fill(padded.flatten(), -1).view(padded.shape)
    rank = (rank.t() if sequence_first else rank).flatten()
    starts = functional.pad(kept.sum(1).cumsum(0), (1, 0)).int()
    return Packed(Places(order.masked_fill(behind, -1).int(), rank.int()), starts)
