"""Transformer Engine's Fp8Unpadding over apex_te's."""

from __future__ import annotations

from .....module.grouped.padding import Fp8Unpadding as NativeFp8Unpadding
from ..._extra_state import WithoutExtraState
from ..._names import named
from .base import TransformerEngineBaseModule

__all__ = ["Fp8Unpadding"]


@named("transformer_engine.pytorch.module.fp8_unpadding")
class Fp8Unpadding(WithoutExtraState, TransformerEngineBaseModule, NativeFp8Unpadding):
    """``apex_te.Fp8Unpadding``, which removes rows of zeros at the end of each group of rows.

    Args:
        num_gemms: number of groups.
        align_size: the multiple; None takes that of the recipe in use: 16, or 32 with MXFP8.
    """
