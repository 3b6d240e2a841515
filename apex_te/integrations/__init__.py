"""Use of apex_te with other libraries: conversion of their models, and of saved state.

``integrations.megatron`` has layers with the names and signatures of Megatron's and MindSpeed's.
"""

import sys as _sys
import typing as _typing
from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from types import ModuleType as _ModuleType

from ..runtime.imports import attach as _attach

if _typing.TYPE_CHECKING:
    from .autocast_forward import autocast_forward as autocast_forward
    from .checkpoints.load import from_fp8_checkpoint as from_fp8_checkpoint
    from .checkpoints.load import load_fp8_shards as load_fp8_shards
    from .experts import register_experts as register_experts
    from .export import export_fp8 as export_fp8
    from .fp8_tensors import fp8_tensors as fp8_tensors
    from .from_torch import from_torch as from_torch
    from .fused_lora import fuse_lora as fuse_lora
    from .fused_loss import fuse_loss as fuse_loss
    from .fusion import KeyMap as KeyMap
    from .fusion import key_map as key_map
    from .latent_attention import fuse_latent_attention as fuse_latent_attention
    from .optimizer_order import reorder_fused_state as reorder_fused_state
    from .optimizer_order import reorder_grouped_linear_state as reorder_grouped_linear_state
    from .saving import load_fp8_state as load_fp8_state
    from .saving import save_fp8_state as save_fp8_state
    from .split_attention import set_context_parallel_group as set_context_parallel_group
    from .summary import ConversionSummary as ConversionSummary
    from .summary import conversion_summary as conversion_summary
    from .te_state import load_te_extra_state as load_te_extra_state
    from .te_state import read_te_extra_state as read_te_extra_state

_NAMES = {
    "ConversionSummary": "summary",
    "KeyMap": "fusion",
    "autocast_forward": "autocast_forward",
    "conversion_summary": "summary",
    "export_fp8": "export",
    "fp8_tensors": "fp8_tensors",
    "from_fp8_checkpoint": "checkpoints.load",
    "from_torch": "from_torch",
    "fuse_latent_attention": "latent_attention",
    "fuse_lora": "fused_lora",
    "fuse_loss": "fused_loss",
    "key_map": "fusion",
    "load_fp8_shards": "checkpoints.load",
    "load_fp8_state": "saving",
    "load_te_extra_state": "te_state",
    "read_te_extra_state": "te_state",
    "register_experts": "experts",
    "reorder_fused_state": "optimizer_order",
    "reorder_grouped_linear_state": "optimizer_order",
    "save_fp8_state": "saving",
    "set_context_parallel_group": "split_attention",
}
__all__ = list(_NAMES)


class _Package(_ModuleType):
    """Package whose functions are not hidden by the submodules that have their names."""

    def __setattr__(self, name: str, value: _typing.Any) -> None:
        if name not in _NAMES or not isinstance(value, _ModuleType):
            super().__setattr__(name, value)


if not _typing.TYPE_CHECKING:  # type checkers know the names above, and no others
    _sys.modules[__name__].__class__ = _Package
    _get, __dir__ = _attach(__name__, _NAMES, beside="huggingface")

    def __getattr__(name: str) -> _typing.Any:
        """Returns a public name or a submodule, which is imported now."""
        if name not in _NAMES and _find_spec(f"{__name__}.{name}") is not None:
            return _import_module(f"{__name__}.{name}")
        return _get(name)
