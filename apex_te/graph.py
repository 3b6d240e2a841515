"""Public name of ``make_graphed_callables``, which captures modules as CUDA graphs, also in FP8."""

from .graphs.graphed_callables import make_graphed_callables

__all__ = ["make_graphed_callables"]
