"""Transformer Engine's LayerNorm: apex_te's norm, which is not a ``torch.nn.LayerNorm`` here."""

from __future__ import annotations

from .....module.layer_norm import LayerNormLayer
from ..._names import named
from .base import TransformerEngineBaseModule, norm_constructor

__all__ = ["LayerNorm"]


@named("transformer_engine.pytorch.module.layernorm")
class LayerNorm(TransformerEngineBaseModule, LayerNormLayer):
    """Normalisation of the last dimension(s), as ``apex_te.LayerNorm`` does it.

    ``sequence_parallel=None`` stands for False; ``device`` is as in ``Linear``.
    """

    __init__ = norm_constructor("LayerNorm", LayerNormLayer)
