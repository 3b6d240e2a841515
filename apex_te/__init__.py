"""Fused Transformer kernels for PyTorch that compile themselves on first use, and FP8 training.

Importing compiles nothing, opens no CUDA context and needs no compiler or GPU.
"""

import os as _os
import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING

import torch as _torch

from ._paths import extend as _extend_package_path
from ._version import __version__

if not _sys.platform.startswith("linux"):
    raise ImportError(f"apex_te runs on Linux (x86-64, aarch64), got {_sys.platform}")
if not hasattr(_torch.Tensor, "__dlpack_c_exchange_api__"):
    raise ImportError(
        "apex_te needs torch.Tensor.__dlpack_c_exchange_api__, which torch 2.10 and later have, "
        f"got torch {_torch.__version__}"
    )
_extend_package_path(__path__)

from ._lazy import attach as _attach  # noqa: E402

if _TYPE_CHECKING:
    from . import amp as amp
    from . import compatibility as compatibility  # type: ignore[attr-defined]
    from . import distributed as distributed
    from . import integrations as integrations
    from . import nvtx as nvtx
    from . import ops as ops
    from . import optimizers as optimizers
    from . import permutation as permutation
    from . import recipe as recipe
    from . import statistics as statistics
    from ._prebuild import prebuild as prebuild
    from .arguments import (
        add_fp8_arguments as add_fp8_arguments,
    )
    from .arguments import (
        recipe_from_arguments as recipe_from_arguments,
    )
    from .autocast import autocast as autocast
    from .autocast import fp8_autocast as fp8_autocast
    from .autocast import is_fp8_enabled as is_fp8_enabled
    from .distributed.checkpoint import checkpoint as checkpoint
    from .distributed.rng import CudaRNGStatesTracker as CudaRNGStatesTracker
    from .graph import make_graphed_callables as make_graphed_callables
    from .model_init import fp8_model_init as fp8_model_init
    from .model_init import quantized_model_init as quantized_model_init
    from .module.dot_product_attention import DotProductAttention as DotProductAttention
    from .module.fp8_padding import Fp8Padding as Fp8Padding
    from .module.fp8_padding import Fp8Unpadding as Fp8Unpadding
    from .module.grouped_linear import GroupedLinear as GroupedLinear
    from .module.layer_norm import LayerNorm as LayerNorm
    from .module.layer_norm_linear import LayerNormLinear as LayerNormLinear
    from .module.layer_norm_mlp import LayerNormMLP as LayerNormMLP
    from .module.linear import Linear as Linear
    from .module.multihead_attention import MultiheadAttention as MultiheadAttention
    from .module.rms_norm import RMSNorm as RMSNorm
    from .module.transformer_layer import TransformerLayer as TransformerLayer
    from .recipe import make_recipe as make_recipe
    from .state import flush_fp8_state as flush_fp8_state
    from .state import init_fp8_state as init_fp8_state
    from .statistics import fp8_statistics as fp8_statistics

_NAMES = {
    "CudaRNGStatesTracker": "distributed.rng",
    "DotProductAttention": "module.dot_product_attention",
    "Fp8Padding": "module.fp8_padding",
    "Fp8Unpadding": "module.fp8_padding",
    "GroupedLinear": "module.grouped_linear",
    "LayerNorm": "module.layer_norm",
    "LayerNormLinear": "module.layer_norm_linear",
    "LayerNormMLP": "module.layer_norm_mlp",
    "Linear": "module.linear",
    "MultiheadAttention": "module.multihead_attention",
    "RMSNorm": "module.rms_norm",
    "TransformerLayer": "module.transformer_layer",
    "add_fp8_arguments": "arguments",
    "amp": "",
    "autocast": "autocast",
    "checkpoint": "distributed.checkpoint",
    "compatibility": "",
    "distributed": "",
    "flush_fp8_state": "state",
    "fp8_autocast": "autocast",
    "fp8_model_init": "model_init",
    "fp8_statistics": "statistics",
    "init_fp8_state": "state",
    "integrations": "",
    "is_fp8_enabled": "autocast",
    "make_graphed_callables": "graph",
    "make_recipe": "recipe",
    "nvtx": "",
    "ops": "",
    "optimizers": "",
    "permutation": "",
    "prebuild": "_prebuild",
    "quantized_model_init": "model_init",
    "recipe": "",
    "recipe_from_arguments": "arguments",
    "statistics": "",
}
__all__ = ["__version__", *_NAMES]
__getattr__, __dir__ = _attach(__name__, _NAMES)

if _os.environ.get("APEX_TE_NVTX", "0") not in ("", "0"):
    from . import nvtx as nvtx
if _os.environ.get("APEX_TE_TOPLEVEL_COMPAT"):
    from .compatibility.apex import install_from_environment as _install_apex_names

    _install_apex_names()
