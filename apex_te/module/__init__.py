"""Modules that run in FP8 inside ``apex_te.fp8_autocast``."""

from .linear import Linear

__all__ = ["Linear"]
