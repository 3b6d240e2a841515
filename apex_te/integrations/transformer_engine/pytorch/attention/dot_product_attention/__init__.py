"""Transformer Engine's ``pytorch.attention.dot_product_attention``."""

from . import context_parallel as context_parallel
from .dot_product_attention import DotProductAttention

__all__ = ["DotProductAttention"]
