"""Transformer Engine's rotary position embedding over apex_te's."""

from __future__ import annotations

from .....module.attention.rotary import RotaryPositionEmbedding as NativeRotaryPositionEmbedding
from .....module.attention.rotary import apply_fused_qkv_rotary_pos_emb, apply_rotary_pos_emb
from ..._device import default_device
from ..._names import named

__all__ = ["RotaryPositionEmbedding", "apply_fused_qkv_rotary_pos_emb", "apply_rotary_pos_emb"]


@named("transformer_engine.pytorch.attention.rope")
class RotaryPositionEmbedding(NativeRotaryPositionEmbedding):
    """Angles of rotary embedding, as ``apex_te.RotaryPositionEmbedding`` computes them.

    They are computed on PyTorch's default device if one is set, else on the current GPU, and on the
    CPU where there is none.
    """

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__(
            dim, rotary_percent, seq_len_interpolation_factor, pretrained_max_position_embeddings,
            rotary_base, interleaved, device=default_device(None),
        )  # fmt: skip
