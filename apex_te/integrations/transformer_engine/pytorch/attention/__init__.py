"""Transformer Engine's ``pytorch.attention``: attention, rotary embedding and the KV cache."""

from ..._names import not_served
from ..utils import SplitAlongDim as _SplitAlongDim  # by the name that Megatron imports
from .dot_product_attention import DotProductAttention
from .inference import InferenceParams
from .multi_head_attention import MultiheadAttention
from .rope import RotaryPositionEmbedding, apply_fused_qkv_rotary_pos_emb, apply_rotary_pos_emb

_NO_DELTA_NET = "linear attention is not supported; use a library that provides its kernels"
GatedDeltaNetAttention = not_served(
    "transformer_engine.pytorch.attention.GatedDeltaNetAttention", _NO_DELTA_NET
)
GatedDeltaNet2Attention = not_served(
    "transformer_engine.pytorch.attention.GatedDeltaNet2Attention", _NO_DELTA_NET
)

__all__ = [
    "DotProductAttention", "GatedDeltaNet2Attention", "GatedDeltaNetAttention", "InferenceParams",
    "MultiheadAttention", "RotaryPositionEmbedding", "_SplitAlongDim",
    "apply_fused_qkv_rotary_pos_emb", "apply_rotary_pos_emb",
]  # fmt: skip
