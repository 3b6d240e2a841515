"""Transformer Engine's ``pytorch.attention``: attention, rotary embedding and the KV cache."""

from ..utils import SplitAlongDim as _SplitAlongDim  # by the name that Megatron imports
from .dot_product_attention import DotProductAttention
from .inference import InferenceParams
from .multi_head_attention import MultiheadAttention
from .rope import RotaryPositionEmbedding, apply_fused_qkv_rotary_pos_emb, apply_rotary_pos_emb

__all__ = [
    "DotProductAttention",
    "InferenceParams",
    "MultiheadAttention",
    "RotaryPositionEmbedding",
    "_SplitAlongDim",
    "apply_fused_qkv_rotary_pos_emb",
    "apply_rotary_pos_emb",
]
