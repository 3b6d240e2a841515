"""Fused Transformer kernels for PyTorch that compile themselves on first use, and FP8 training.

Importing compiles nothing, opens no CUDA context and needs no compiler or GPU.
"""

import sys as _sys

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

from . import recipe  # noqa: E402
from .autocast import fp8_autocast, is_fp8_enabled  # noqa: E402
from .module import LayerNormLinear, LayerNormMLP, Linear  # noqa: E402
from .state import flush_fp8_state, init_fp8_state  # noqa: E402

__all__ = [
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "__version__",
    "flush_fp8_state",
    "fp8_autocast",
    "init_fp8_state",
    "is_fp8_enabled",
    "recipe",
]
