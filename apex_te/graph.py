"""CUDA graphs of modules that compute in FP8."""

from .graphs.graphed_callables import make_graphed_callables

__all__ = ["make_graphed_callables"]
