"""Public name of ``fp8_statistics``, which records amax, scale and saturation of FP8 casts."""

from .fp8.statistics import fp8_statistics

__all__ = ["fp8_statistics"]
