"""Functions on the FP8 state of a model."""

from .fp8.delayed.state import FP8State, flush_fp8_state, init_fp8_state, nonfinite_count

__all__ = ["FP8State", "flush_fp8_state", "init_fp8_state", "nonfinite_count"]
