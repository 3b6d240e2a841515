"""Layers by the names and signatures that Megatron and MindSpeed use, over apex_te's modules.

Nothing of Megatron or MindSpeed is imported. ``config`` is any object with attributes (a dataclass,
a SimpleNamespace, Megatron's TransformerConfig); ``_config.DEFAULTS`` lists those that are read.
"""

from .grouped import (
    MindSpeedTEColumnParallelGroupedLinear,
    MindSpeedTEGroupedLinear,
    MindSpeedTERowParallelGroupedLinear,
)
from .linear import (
    MindSpeedTELayerNormColumnParallelLinear,
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TERowParallelLinear,
)
from .norm import MindSpeedTELayernorm

__all__ = [
    "MindSpeedTEColumnParallelGroupedLinear",
    "MindSpeedTEGroupedLinear",
    "MindSpeedTELayerNormColumnParallelLinear",
    "MindSpeedTELayernorm",
    "MindSpeedTERowParallelGroupedLinear",
    "TEColumnParallelLinear",
    "TELayerNormColumnParallelLinear",
    "TERowParallelLinear",
]
