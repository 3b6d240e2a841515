"""Public names of the FP8 state and of state dicts for PyTorch."""

from .fp8_state import (
    FP8_COLLECTION_NAME,
    TENSORS,
    as_floats,
    cotangent,
    entered,
    initial,
    max_over_uses,
    of_gemm,
    update_collections,
    update_fp8_metas,
)
from .stacked_layers import stack_layers, unstack_layers
from .torch_state_dict import from_torch, to_torch

__all__ = [
    "FP8_COLLECTION_NAME", "TENSORS", "as_floats", "cotangent", "entered", "from_torch", "initial",
    "max_over_uses", "of_gemm", "stack_layers", "to_torch", "unstack_layers", "update_collections",
    "update_fp8_metas",
]  # fmt: skip
