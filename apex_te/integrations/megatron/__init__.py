"""apex_te's modules with the names and signatures that Megatron and MindSpeed use.

Neither Megatron nor MindSpeed is imported. ``config`` is any object with attributes (a dataclass,
a SimpleNamespace, Megatron's TransformerConfig); ``_config.DEFAULTS`` lists the attributes that are
read, with their defaults.
"""

from ...module.grouped.padding import Fp8Padding, Fp8Unpadding
from .grouped import (
    MindSpeedTEColumnParallelGroupedLinear,
    MindSpeedTEGroupedLinear,
    MindSpeedTERowParallelGroupedLinear,
)
from .linear import (
    MindSpeedTELayernorm,
    MindSpeedTELayerNormColumnParallelLinear,
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TERowParallelLinear,
)

# MindSpeed's documentation names these without the prefix.
TELayernorm = MindSpeedTELayernorm
TEGroupedLinear = MindSpeedTEGroupedLinear

__all__ = [
    "Fp8Padding", "Fp8Unpadding", "MindSpeedTEColumnParallelGroupedLinear",
    "MindSpeedTEGroupedLinear", "MindSpeedTELayerNormColumnParallelLinear", "MindSpeedTELayernorm",
    "MindSpeedTERowParallelGroupedLinear", "TEColumnParallelLinear", "TEGroupedLinear",
    "TELayerNormColumnParallelLinear", "TELayernorm", "TERowParallelLinear",
]  # fmt: skip
