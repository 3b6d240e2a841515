"""FP8 training for JAX: the compiled ops that the PyTorch modules use, called from XLA programs.

Needs JAX 0.10 or later and no torch. Importing compiles nothing; a program's ops are built, if no
cache holds them, while it is lowered. ``apex_te.jax.flax`` and ``apex_te.jax.nnx`` have Flax
modules, ``apex_te.jax.ops`` the ops as functions, ``apex_te.jax.optimizers`` fused optimizers for
optax.
"""

import typing as _typing

from ..runtime.imports import attach as _attach
from ._library import load as load
from .fp8_state import FP8_COLLECTION_NAME as FP8_COLLECTION_NAME
from .fp8_state import max_over_uses as max_over_uses
from .fp8_state import update_collections as update_collections
from .fp8_state import update_fp8_metas as update_fp8_metas
from .region import MeshResource as MeshResource
from .region import autocast as autocast
from .region import fp8_autocast as fp8_autocast
from .region import get_delayed_scaling as get_delayed_scaling
from .region import is_fp8_available as is_fp8_available

NVTE_FP8_COLLECTION_NAME = FP8_COLLECTION_NAME
ShardingResource = MeshResource
__all__ = [
    "FP8_COLLECTION_NAME", "NVTE_FP8_COLLECTION_NAME", "MeshResource", "MoEOutput",
    "ShardingResource", "autocast", "einsum", "fp8_autocast", "get_delayed_scaling",
    "is_fp8_available", "load", "max_over_uses", "moe", "update_collections",
    "update_expert_bias", "update_fp8_metas",
]  # fmt: skip
if _typing.TYPE_CHECKING:  # for type checkers, which do not know other names
    from . import activation as activation
    from . import attention as attention
    from . import checkpoint_policies as checkpoint_policies
    from . import context_parallel as context_parallel
    from . import dense as dense
    from . import flax as flax
    from . import layernorm as layernorm
    from . import layernorm_dense as layernorm_dense
    from . import layernorm_mlp as layernorm_mlp
    from . import nnx as nnx
    from . import ops as ops
    from . import optimizers as optimizers
    from . import quantize as quantize
    from . import sharding as sharding
    from . import softmax as softmax
    from . import state as state
    from .contraction import einsum as einsum
    from .experts import MoEOutput as MoEOutput
    from .experts import moe as moe
    from .experts import update_expert_bias as update_expert_bias
else:
    _SUBMODULES = (
        "activation", "attention", "checkpoint_policies", "context_parallel", "dense", "flax",
        "layernorm", "layernorm_dense", "layernorm_mlp", "nnx", "ops", "optimizers", "quantize",
        "sharding", "softmax", "state",
    )  # fmt: skip
    _names = {
        **dict.fromkeys(_SUBMODULES, ""), "einsum": "contraction",
        **dict.fromkeys(("MoEOutput", "moe", "update_expert_bias"), "experts"),
    }  # fmt: skip
    __getattr__, __dir__ = _attach(__name__, _names)
