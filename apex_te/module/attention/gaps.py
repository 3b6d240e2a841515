"""Gaps between packed sequences: tokens that belong to none, left out while attention computes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...ops.binding import OpFunction


class Gaps(NamedTuple):
    """Positions of tokens in memory with gaps between the sequences, and in memory without gaps.

    ``sources``, int64 [t], maps positions without gaps to those with gaps; ``targets`` maps back.
    ``is_gap`` (with gaps) and ``is_behind`` (without), bool [t, 1, 1], mark positions of no
    sequence.
    """

    sources: torch.Tensor
    targets: torch.Tensor
    is_gap: torch.Tensor
    is_behind: torch.Tensor

    def close(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the tokens of ``x`` [t, h, d] without gaps, zeros after the last sequence."""
        return _Moved.apply(x, self.sources, self.is_behind, self.targets, self.is_gap)

    def open(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the tokens of ``x`` [t, h, d], which has no gaps, with gaps of zeros."""
        return _Moved.apply(x, self.targets, self.is_gap, self.sources, self.is_behind)


def gaps_of(
    owner: str, name: str, cu: torch.Tensor, padded: torch.Tensor | None, tokens: int
) -> Gaps | None:
    """Returns the ``Gaps`` of packed tokens; None if ``padded`` is None or ``cu`` itself."""
    if padded is None or padded is cu:
        return None
    argument = f"{owner}: cu_seqlens_{name}_padded"
    if not isinstance(padded, torch.Tensor) or padded.dtype is not torch.int32:
        actual = padded.dtype if isinstance(padded, torch.Tensor) else type(padded).__name__
        raise TypeError(f"{argument} must be an int32 tensor, got {actual}")
    if padded.shape != cu.shape:
        raise ValueError(
            f"{argument} must have the shape of cu_seqlens_{name}, {list(cu.shape)}, "
            f"got {list(padded.shape)}"
        )
    if padded.device.type == "cpu" and not torch.compiler.is_compiling():
        room, last = int((padded.diff() - cu.diff()).min()), int(padded[-1])
        if room < 0 or last > tokens or int(padded[0]) < 0:
            raise ValueError(
                f"{argument} must leave room for each sequence within {tokens} tokens, "
                f"got {padded.tolist()} for sequences of {cu.diff().tolist()} tokens"
            )
    place = torch.arange(tokens, dtype=torch.int32, device=cu.device)
    sequences = cu.shape[0] - 1
    own = _sequence(cu, place, sequences)
    sources = (place - cu[own] + padded[own]).clamp(0, max(tokens - 1, 0)).long()
    wide = _sequence(padded, place, sequences)
    offset = place - padded[wide]
    is_gap = (offset < 0) | (offset >= cu[wide + 1] - cu[wide])
    targets = (cu[wide] + offset).masked_fill(is_gap, 0).clamp(0, max(tokens - 1, 0)).long()
    return Gaps(sources, targets, is_gap[:, None, None], (place >= cu[-1])[:, None, None])


def _sequence(cu: torch.Tensor, place: torch.Tensor, sequences: int) -> torch.Tensor:
    """Returns the number of the sequence that each place is in or behind."""
    return (torch.searchsorted(cu, place, right=True) - 1).clamp(0, sequences - 1)


class _Moved(OpFunction):
    """Tokens of ``x`` moved to other places; backward moves the gradient back, without a sum."""

    LABEL = "DotProductAttention"

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        index: torch.Tensor,
        hidden: torch.Tensor,
        back_index: torch.Tensor,
        back_hidden: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(index, hidden, back_index, back_hidden)
        return x.index_select(0, index).masked_fill_(hidden, 0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        index, hidden, back_index, back_hidden = ctx.saved_tensors
        return _Moved.apply(grad, back_index, back_hidden, index, hidden), None, None, None, None
