"""Public names of the FP8 state: its class, its allocation, pending updates, NaN and Inf counts."""

from .fp8.delayed.state import FP8State, nonfinite_count
from .fp8.delayed.update import flush_fp8_state
from .fp8.module_fp8 import init_fp8_state

__all__ = ["FP8State", "flush_fp8_state", "init_fp8_state", "nonfinite_count"]
