"""The learning rate of a step."""

from __future__ import annotations

import math


def learning_rate(step: int, steps: int, warmup: int, peak: float, final: float) -> float:
    """Returns the rate of a step: linear warm-up, then a cosine to a part of the peak.

    Args:
        step: from 0.
        steps: of the whole run.
        warmup: steps until the peak.
        peak: the largest rate.
        final: the last rate over the peak.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)))
