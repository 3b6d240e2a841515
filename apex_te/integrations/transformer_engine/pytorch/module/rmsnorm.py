"""Transformer Engine's RMSNorm: apex_te's norm, which is not a ``torch.nn.RMSNorm`` here."""

from __future__ import annotations

from .....module.rms_norm import RMSNormLayer
from ..._names import named
from .base import TransformerEngineBaseModule, norm_constructor

__all__ = ["RMSNorm"]


@named("transformer_engine.pytorch.module.rmsnorm")
class RMSNorm(TransformerEngineBaseModule, RMSNormLayer):
    """Normalisation of the last dimension(s), as ``apex_te.RMSNorm`` does it.

    ``sequence_parallel=None`` stands for False; ``device`` is as in ``Linear``.
    """

    __init__ = norm_constructor("RMSNorm", RMSNormLayer)
