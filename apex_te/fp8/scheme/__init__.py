"""Schemes, one a file: quantizers, GEMM backend and stored layout of a recipe."""

from .base import GemmQuantizers, QuantizerSets, build_quantizers

__all__ = ["GemmQuantizers", "QuantizerSets", "build_quantizers"]
