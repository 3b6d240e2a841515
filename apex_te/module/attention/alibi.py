"""ALiBi: a bias of attention scores that falls with the distance, by a slope for each head."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import distributed

from .masks import Mask, MaskType, distances

COLUMNS = 8
_MOST_KEYS = 2**16  # below, bf16 has all multiples of 256


class Alibi(NamedTuple):
    """Positions for ALiBi's bias; mask types that count from the end ignore padded tokens."""

    kind: MaskType
    mask: Mask

    def bias(self, slopes: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Returns the bias ``-slope * |i - j|`` [1 or b, h, sq, sk] in the dtype of ``q``."""
        apart = distances(self.kind, self.mask, q.shape[2], k.shape[2], q.device)
        return (apart * -slopes[..., None, None]).to(q.dtype)

    def has_columns(self, slopes: torch.Tensor, dtype: torch.dtype, keys: int) -> bool:
        """Returns True if ``columns`` add the bias, up to a constant of each query."""
        counts_all = not (self.kind.padding and self.kind.bottom_right)
        fits = dtype is torch.bfloat16 and keys <= _MOST_KEYS  # fp16 may overflow
        return self.kind.causal and counts_all and fits and not slopes.requires_grad

    def columns(
        self, slopes: torch.Tensor, q: torch.Tensor, k: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns q and k with ``COLUMNS`` more, which add ``slope * j`` to the scaled scores.

        Of keys up to the query's position ``i`` that is the bias but for ``-slope * i``, which a
        softmax without a sink ignores. Slopes and positions are split so that no part is rounded.
        """
        rest, parts = slopes / scale, []
        for _ in range(3):
            parts.append(rest.to(q.dtype))
            rest = rest - parts[-1].float()
        parts = [each for each in parts for _ in range(2)] + [torch.zeros_like(parts[0])] * 2
        more = torch.stack(parts, -1)[..., None, :].expand(*q.shape[:3], -1)
        j = torch.arange(k.shape[2], device=k.device)
        high, low = j // 256 * 256, j % 256
        positions = torch.stack((high, low) * 4, -1).to(k.dtype).expand(*k.shape[:3], -1)
        return torch.cat((q, more), -1), torch.cat((k, positions), -1)


def standard_slopes(
    owner: str, heads: int, ranks: int, group: Any, device: torch.device
) -> torch.Tensor:
    """Returns the slopes of the ALiBi paper for this rank's heads, float32 [heads].

    If the number of heads ``n`` is a power of 2, they are ``2 ** (-8 i / n)`` for ``i`` from 1. For
    other numbers they are those of the next lower power of 2, then every second one of the next
    higher.
    """
    if ranks > 1 and group is None:
        raise ValueError(
            f"{owner}: alibi_slopes must be given with heads split over {ranks} ranks and no "
            "tp_group, got None"
        )
    total = heads * ranks
    power = 1 << (total.bit_length() - 1)
    # On the device: a tensor made of numbers of the host would have to be copied there.
    steps = torch.arange(1, power + 1, dtype=torch.float32, device=device) * (-8.0 / power)
    if total > power:
        rest = torch.arange(1, 2 * (total - power), 2, dtype=torch.float32, device=device)
        steps = torch.cat((steps, rest * (-4.0 / power)))
    slopes = steps.exp2()
    if ranks > 1:
        slopes = slopes.narrow(0, heads * distributed.get_rank(group), heads)
    return slopes


def checked_slopes(owner: str, slopes: Any, heads: int, batch: int) -> torch.Tensor:
    """Returns the argument ``alibi_slopes``, [heads] or [batch, heads], as float32."""
    if not isinstance(slopes, torch.Tensor) or not slopes.is_floating_point():
        actual = slopes.dtype if isinstance(slopes, torch.Tensor) else type(slopes).__name__
        raise TypeError(f"{owner}: alibi_slopes must be a floating-point tensor, got {actual}")
    if slopes.shape not in ((heads,), (batch, heads)):
        raise ValueError(
            f"{owner}: alibi_slopes must have shape {[heads]} or {[batch, heads]}, "
            f"got {list(slopes.shape)}"
        )
    return slopes.float()
