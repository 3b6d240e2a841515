"""Public name of FP8Parameter, a weight that is held in low precision only."""

from .fp8.parameter.parameter import FP8Parameter
from .fp8.parameter.parameter import _rebuild as _rebuild  # its name in saved files

__all__ = ["FP8Parameter"]
