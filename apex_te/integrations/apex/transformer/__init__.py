"""apex.transformer: tensor, sequence and pipeline parallelism in the interface of Megatron-LM.

Megatron-Core is its successor. The modules also run on the CPU, over gloo.
"""

from . import (
    amp,
    functional,
    layers,
    microbatches,
    parallel_state,
    pipeline_parallel,
    tensor_parallel,
    utils,
)
from .enums import AttnMaskType, AttnType, LayerType, ModelType

__all__ = [
    "AttnMaskType",
    "AttnType",
    "LayerType",
    "ModelType",
    "amp",
    "functional",
    "layers",
    "microbatches",
    "parallel_state",
    "pipeline_parallel",
    "tensor_parallel",
    "utils",
]
