"""Fused Transformer kernels for PyTorch that compile themselves on first use, and FP8 training.

Importing compiles nothing, opens no CUDA context and needs no compiler or GPU. torch is imported
with the first name that needs it: ``apex_te.jax``, ``apex_te.recipe`` and ``apex_te.prebuild`` do
without.
"""

import os as _os
import sys as _sys
import typing as _typing

from .runtime.imports import attach as _attach
from .runtime.imports import check_torch as _check_torch
from .runtime.imports import extend as _extend_package_path
from .runtime.imports import find_former_names as _find_former_names

if not _sys.platform.startswith("linux"):
    raise ImportError(f"apex_te runs on Linux (x86-64, aarch64), got {_sys.platform}")
if "torch" in _sys.modules:
    _check_torch()
_extend_package_path(__path__)
_find_former_names()

if _typing.TYPE_CHECKING:
    from . import amp as amp
    from . import compatibility as compatibility
    from . import distributed as distributed
    from . import integrations as integrations
    from . import nvtx as nvtx
    from . import ops as ops
    from . import optimizers as optimizers
    from . import parameter as parameter
    from . import permutation as permutation
    from . import recipe as recipe
    from . import router as router
    from . import state as state
    from ._version import __version__ as __version__
    from .autocast import autocast as autocast
    from .autocast import fp8_autocast as fp8_autocast
    from .autocast import is_fp8_enabled as is_fp8_enabled
    from .comm.rng import CudaRNGStatesTracker as CudaRNGStatesTracker
    from .distributed.checkpoint import checkpoint as checkpoint
    from .fp8 import statistics as statistics
    from .fp8.arguments import (
        add_fp8_arguments as add_fp8_arguments,
    )
    from .fp8.arguments import (
        recipe_from_arguments as recipe_from_arguments,
    )
    from .fp8.delayed.update import flush_fp8_state as flush_fp8_state
    from .fp8.model_init import fp8_model_init as fp8_model_init
    from .fp8.model_init import quantized_model_init as quantized_model_init
    from .fp8.module_fp8 import init_fp8_state as init_fp8_state
    from .fp8.statistics import fp8_statistics as fp8_statistics
    from .graphs.graphed_callables import make_graphed_callables as make_graphed_callables
    from .integrations.autocast_forward import autocast_forward as autocast_forward
    from .integrations.checkpoints.load import from_fp8_checkpoint as from_fp8_checkpoint
    from .integrations.export import export_fp8 as export_fp8
    from .integrations.fp8_tensors import fp8_tensors as fp8_tensors
    from .integrations.from_torch import from_torch as from_torch
    from .integrations.fused_lora import fuse_lora as fuse_lora
    from .integrations.fused_loss import fuse_loss as fuse_loss
    from .integrations.huggingface import FP8Callback as FP8Callback
    from .integrations.latent_attention import (
        fuse_latent_attention as fuse_latent_attention,
    )
    from .integrations.layer_advice import advise as advise
    from .integrations.summary import conversion_summary as conversion_summary
    from .module._core.kept_weights import keep_fp8_weights as keep_fp8_weights
    from .module.attention.context_parallel.split import (
        join_context_parallel as join_context_parallel,
    )
    from .module.attention.context_parallel.split import (
        split_for_context_parallel as split_for_context_parallel,
    )
    from .module.attention.dot_product import DotProductAttention as DotProductAttention
    from .module.attention.inference_params import InferenceParams as InferenceParams
    from .module.attention.latent import MultiLatentAttention as MultiLatentAttention
    from .module.attention.multihead import MultiheadAttention as MultiheadAttention
    from .module.attention.rotary import RotaryPositionEmbedding as RotaryPositionEmbedding
    from .module.attention.rotary import apply_rotary_pos_emb as apply_rotary_pos_emb
    from .module.attention.rotary_yarn import YarnRotaryEmbedding as YarnRotaryEmbedding
    from .module.grouped.linear import GroupedLinear as GroupedLinear
    from .module.grouped.padding import Fp8Padding as Fp8Padding
    from .module.grouped.padding import Fp8Unpadding as Fp8Unpadding
    from .module.layer_norm import LayerNorm as LayerNorm
    from .module.layer_norm_linear import LayerNormLinear as LayerNormLinear
    from .module.layer_norm_mlp import LayerNormMLP as LayerNormMLP
    from .module.linear import Linear as Linear
    from .module.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from .module.linear_log_probs import linear_log_probs as linear_log_probs
    from .module.moe_layer import MoELayer as MoELayer
    from .module.rms_norm import RMSNorm as RMSNorm
    from .module.transformer_layer import TransformerLayer as TransformerLayer
    from .recipe import make_recipe as make_recipe
    from .runtime.invariance import batch_invariant as batch_invariant
    from .runtime.invariance import is_batch_invariant as is_batch_invariant
    from .runtime.prebuild import prebuild as prebuild

_NAMES = {
    "__version__": "_version",
    "CudaRNGStatesTracker": "comm.rng",
    "DotProductAttention": "module.attention.dot_product",
    "FP8Callback": "integrations.huggingface",
    "Fp8Padding": "module.grouped.padding",
    "Fp8Unpadding": "module.grouped.padding",
    "GroupedLinear": "module.grouped.linear",
    "InferenceParams": "module.attention.inference_params",
    "LayerNorm": "module.layer_norm",
    "LayerNormLinear": "module.layer_norm_linear",
    "LayerNormMLP": "module.layer_norm_mlp",
    "Linear": "module.linear",
    "MoELayer": "module.moe_layer",
    "MultiLatentAttention": "module.attention.latent",
    "MultiheadAttention": "module.attention.multihead",
    "RMSNorm": "module.rms_norm",
    "RotaryPositionEmbedding": "module.attention.rotary",
    "TransformerLayer": "module.transformer_layer",
    "YarnRotaryEmbedding": "module.attention.rotary_yarn",
    "add_fp8_arguments": "fp8.arguments",
    "advise": "integrations.layer_advice",
    "amp": "",
    "apply_rotary_pos_emb": "module.attention.rotary",
    "autocast": "autocast",
    "autocast_forward": "integrations.autocast_forward",
    "batch_invariant": "runtime.invariance",
    "checkpoint": "distributed.checkpoint",
    "compatibility": "",
    "conversion_summary": "integrations.summary",
    "distributed": "",
    "export_fp8": "integrations.export",
    "fp8_tensors": "integrations.fp8_tensors",
    "flush_fp8_state": "fp8.delayed.update",
    "fp8_autocast": "fp8.autocast",
    "fp8_model_init": "fp8.model_init",
    "fp8_statistics": "fp8.statistics",
    "from_fp8_checkpoint": "integrations.checkpoints.load",
    "from_torch": "integrations.from_torch",
    "fuse_lora": "integrations.fused_lora",
    "fuse_latent_attention": "integrations.latent_attention",
    "fuse_loss": "integrations.fused_loss",
    "init_fp8_state": "fp8.module_fp8",
    "integrations": "",
    "is_batch_invariant": "runtime.invariance",
    "is_fp8_enabled": "fp8.autocast",
    "join_context_parallel": "module.attention.context_parallel.split",
    "keep_fp8_weights": "module._core.kept_weights",
    "linear_cross_entropy": "module.linear_cross_entropy",
    "linear_log_probs": "module.linear_log_probs",
    "make_graphed_callables": "graphs.graphed_callables",
    "make_recipe": "recipe",
    "nvtx": "",
    "ops": "",
    "optimizers": "",
    "parameter": "",
    "permutation": "",
    "prebuild": "runtime.prebuild",
    "quantized_model_init": "fp8.model_init",
    "recipe": "",
    "recipe_from_arguments": "fp8.arguments",
    "router": "",
    "split_for_context_parallel": "module.attention.context_parallel.split",
    "state": "",
    "statistics": "",
}
# FP8Callback needs transformers, which `from apex_te import *` does without.
__all__ = [name for name in _NAMES if name != "FP8Callback"]
_WITHOUT_TORCH = (
    "__version__", "compatibility", "integrations", "make_recipe", "prebuild", "recipe",
)  # fmt: skip

if not _typing.TYPE_CHECKING:  # type checkers know the names above, and no others
    _get, _names = _attach(__name__, _NAMES, beside="recipe")

    def __getattr__(name: str) -> _typing.Any:
        """Returns a public name, with the modules that define it imported now."""
        if name in _NAMES and name not in _WITHOUT_TORCH:
            _check_torch()
        return _get(name)

    def __dir__() -> list[str]:
        """Returns the names that can be had: ``FP8Callback`` only if transformers is installed."""
        from importlib.util import find_spec

        found = _sys.modules.get("transformers") or find_spec("transformers")
        return [name for name in _names() if name != "FP8Callback" or found]


if _os.environ.get("APEX_TE_NVTX", "0") not in ("", "0"):
    from . import nvtx as nvtx
if _os.environ.get("APEX_TE_TOPLEVEL_COMPAT") or _os.environ.get("APEX_TE_APEX"):
    from .compatibility.apex import install_from_environment as _install_apex_names

    _install_apex_names()
if _os.environ.get("APEX_TE_TRANSFORMER_ENGINE"):
    from .integrations.te_alias import install_from_environment as _install_alias

    _install_alias()
