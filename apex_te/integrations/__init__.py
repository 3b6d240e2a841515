"""Use of apex_te with other libraries: conversion of their models, and of saved state.

``integrations.megatron`` has layers with the names and signatures of Megatron's and MindSpeed's.
"""

from typing import TYPE_CHECKING

from ..runtime.imports import attach
from .autocast_forward import autocast_forward
from .checkpoints.load import from_fp8_checkpoint, load_fp8_shards
from .experts import register_experts
from .export import export_fp8
from .fp8_tensors import fp8_tensors
from .from_torch import from_torch
from .fused_lora import fuse_lora
from .fused_loss import fuse_loss
from .fusion import KeyMap, key_map
from .latent_attention import fuse_latent_attention
from .optimizer_order import reorder_fused_state, reorder_grouped_linear_state
from .saving import load_fp8_state, save_fp8_state
from .split_attention import set_context_parallel_group
from .summary import ConversionSummary, conversion_summary
from .te_state import load_te_extra_state, read_te_extra_state

__all__ = [
    "ConversionSummary",
    "KeyMap",
    "autocast_forward",
    "conversion_summary",
    "export_fp8",
    "fp8_tensors",
    "from_fp8_checkpoint",
    "from_torch",
    "fuse_latent_attention",
    "fuse_lora",
    "fuse_loss",
    "key_map",
    "load_fp8_shards",
    "load_fp8_state",
    "load_te_extra_state",
    "read_te_extra_state",
    "register_experts",
    "reorder_fused_state",
    "reorder_grouped_linear_state",
    "save_fp8_state",
    "set_context_parallel_group",
]

if not TYPE_CHECKING:  # type checkers know the names above, and no others
    __getattr__, __dir__ = attach(__name__, {}, beside="huggingface")
