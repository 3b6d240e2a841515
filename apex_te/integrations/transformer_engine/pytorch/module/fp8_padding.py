"""Transformer Engine's Fp8Padding over apex_te's."""

from __future__ import annotations

from .....module.grouped.padding import Fp8Padding as NativeFp8Padding
from ..._extra_state import WithoutExtraState
from ..._names import named
from .base import TransformerEngineBaseModule

__all__ = ["Fp8Padding"]


@named("transformer_engine.pytorch.module.fp8_padding")
class Fp8Padding(WithoutExtraState, TransformerEngineBaseModule, NativeFp8Padding):
    """``apex_te.Fp8Padding``, which adds rows of zeros at the end of each group of rows."""
