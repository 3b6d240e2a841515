"""Transformer Engine's Fp8Unpadding over apex_te's."""

from __future__ import annotations

from .....module.grouped.padding import Fp8Unpadding as NativeFp8Unpadding
from ..._extra_state import WithoutExtraState
from ..._names import named
from .base import TransformerEngineBaseModule

__all__ = ["Fp8Unpadding"]


@named("transformer_engine.pytorch.module.fp8_unpadding")
class Fp8Unpadding(WithoutExtraState, TransformerEngineBaseModule, NativeFp8Unpadding):
    """``apex_te.Fp8Unpadding``, which removes rows of zeros at the end of each group of rows."""
