"""Schemes, one per file: each defines a recipe's quantizers, GEMM backend and stored weights."""

from .gemm_backend import DGRAD, FPROP, WGRAD, FP8Gemm, GemmBackend, warn_emulated
from .quantizer import FusedCast, Quantizer, shared_scale
from .quantizer_sets import GemmQuantizers, GroupQuantizers, QuantizerSets, group_quantizers
from .registry import Scheme, build_quantizers, layout_of, scheme_of, stored_recipe
from .slots import GemmSlots, ScaleSharing, Slot, Slots
from .stored_layout import Layout

__all__ = [
    "DGRAD",
    "FPROP",
    "WGRAD",
    "FP8Gemm",
    "FusedCast",
    "GemmBackend",
    "GemmQuantizers",
    "GemmSlots",
    "GroupQuantizers",
    "Layout",
    "Quantizer",
    "QuantizerSets",
    "ScaleSharing",
    "Scheme",
    "Slot",
    "Slots",
    "build_quantizers",
    "group_quantizers",
    "layout_of",
    "scheme_of",
    "shared_scale",
    "stored_recipe",
    "warn_emulated",
]
