"""Schemes, one per file: each defines a recipe's quantizers, GEMM backend and stored weights."""

from .base import GemmQuantizers, QuantizerSets, build_quantizers

__all__ = ["GemmQuantizers", "QuantizerSets", "build_quantizers"]
