"""Tokens moved in memory: gaps between packed sequences closed, padding put behind a sequence."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

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


def padding_behind(padded: torch.Tensor, batch: int, sequence_first: bool) -> Places:
    """Returns the places of tokens with padded ones behind the others, which keep their order.

    The layers of a model share what one mask gives.

    Args:
        padded: bool [batch or 1, 1, 1, s], True for padded tokens.
        batch: number of sequences.
        sequence_first: tokens are [s, batch] in memory, not [batch, s].
    """
    global _last
    shareable = not (is_traced() or torch.compiler.is_compiling() or padded.is_inference())
    if shareable and padded.is_cuda:
        # A captured graph keeps no memory of others, and its mask may change between replays.
        shareable = not torch.cuda.is_current_stream_capturing()
    if not shareable:
        return _padding_behind(padded, batch, sequence_first)
    key = (padded._version, batch, sequence_first)
    if _last is None or _last[0]() is not padded or _last[1] != key:
        made = _padding_behind(padded, batch, sequence_first)
        _last = weakref.ref(padded), key, made
    return _last[2]


_last: tuple[weakref.ref, tuple[int, int, bool], Places] | None = None


def _padding_behind(padded: torch.Tensor, batch: int, sequence_first: bool) -> Places:
    padded = padded.flatten(1).expand(batch, -1)
    tokens = padded.shape[1]
    behind, order = padded.sort(dim=1, stable=True)
    rank = padded.logical_not().cumsum(1) - 1
    first = torch.arange(batch, device=padded.device)[:, None]

    def rows(at: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        at = at * batch + first if sequence_first else first * tokens + at
        at = at.masked_fill(hidden, -1).int()
        return (at.t() if sequence_first else at).flatten()

    return Places(torch.stack((rows(order, behind), rows(rank, padded))))
