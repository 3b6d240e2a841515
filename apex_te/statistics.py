"""Statistics of the FP8 casts of a model's modules while it trains."""

from .fp8.statistics import fp8_statistics

__all__ = ["fp8_statistics"]
