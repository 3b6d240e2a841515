"""Rotary angles for longer sequences than a model was first trained with (YaRN)."""

from __future__ import annotations

import math

import torch

from ...runtime.named_arguments import check_count, named_arguments
from .._core.arguments import checked_number
from .rotary import RotaryPositionEmbedding

__all__ = ["YarnRotaryEmbedding"]

_NAME = "YarnRotaryEmbedding"


def yarn_factor(scaling_factor: float, mscale: float) -> float:
    """Returns YaRN's factor of attention for a scaling of positions."""
    return 0.1 * mscale * math.log(scaling_factor) + 1.0 if scaling_factor > 1.0 else 1.0


class YarnRotaryEmbedding(RotaryPositionEmbedding):
    """Angles of rotary embeddings with YaRN, which lowers the frequencies of slow pairs.

    Pairs that complete at least ``beta_fast`` rotations in the original length keep their
    frequency, and those that complete at most ``beta_slow`` have it divided by ``scaling_factor``;
    in between, the two are interpolated linearly. YaRN's attention factors are arguments of
    ``MultiLatentAttention``.

    Args:
        dim: elements of a head that are rotated, even.
        rotary_base: base of the frequencies ``rotary_base ** (-2 i / dim)``.
        interleaved: pairs are elements (2i, 2i + 1); else (i, i + dim / 2).
        scaling_factor: ratio of the new to the original length, at least 1.
        original_max_position_embeddings: the original length.
        beta_fast, beta_slow: numbers of rotations, see above.
        device: device on which the angles are computed; None uses PyTorch's default device.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a number is out of range, or ``beta_fast`` is below ``beta_slow``.

    The formula is that of DeepSeek-V3; ``forward`` is that of ``RotaryPositionEmbedding``.
    """

    @named_arguments()
    def __init__(
        self,
        dim: int,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
        *,
        scaling_factor: float = 1.0,
        original_max_position_embeddings: int = 4096,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__(dim, rotary_base=rotary_base, interleaved=interleaved, device=device)
        if not 1.0 <= checked_number(_NAME, "scaling_factor", scaling_factor) < math.inf:
            raise ValueError(
                f"{_NAME}: scaling_factor must be at least 1 and finite, got {scaling_factor}"
            )
        length = original_max_position_embeddings
        check_count(_NAME, "original_max_position_embeddings", length)
        for name, beta in (("beta_fast", beta_fast), ("beta_slow", beta_slow)):
            if not 0.0 < checked_number(_NAME, name, beta) < math.inf:
                raise ValueError(f"{_NAME}: {name} must be above 0 and finite, got {beta}")
        if beta_fast < beta_slow:
            raise ValueError(
                f"{_NAME}: beta_fast must be at least beta_slow={beta_slow}, got {beta_fast}"
            )
        if rotary_base == 1.0:
            raise ValueError(f"{_NAME}: rotary_base must not be 1, got {rotary_base}")

        def pair(turns: float) -> float:
            """Returns the pair, as a fraction, that turns so often in the original length."""
            return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rotary_base))

        first, last = max(math.floor(pair(beta_fast)), 0), min(math.ceil(pair(beta_slow)), dim - 1)
        pairs = torch.arange(dim // 2, dtype=torch.float32, device=self.inv_freq.device)
        # 0 for pairs that keep their frequency, 1 for those that turn slower.
        slower = ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)
        self.inv_freq = self.inv_freq * (1 - slower) + self.inv_freq / scaling_factor * slower
