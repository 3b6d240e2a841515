"""Transformer Engine's ``pytorch.attention.dot_product_attention``."""

from .dot_product_attention import DotProductAttention

__all__ = ["DotProductAttention"]
