"""Names of ROCm apex's extensions, and the ops behind those that ``compatibility/apex`` has."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .spec import SUITE


class Extension(NamedTuple):
    """An extension of apex."""

    variable: str  # what follows ``APEX_BUILD_`` in the variable that asks for it at install
    builder: str  # class name without ``Builder``
    module: str  # import name


# Variable, builder and module; the module is left out where it is the variable in lower case.
_TABLE = """
AMP_C AmpC amp_C
APEX_C ApexC apex_C
BNP Bnp
DISTRIBUTED_ADAM DistributedAdam distributed_adam_cuda
DISTRIBUTED_LAMB DistributedLamb distributed_lamb_cuda
FAST_MULTIHEAD_ATTN FastMultiheadAttn
FOCAL_LOSS FocalLoss focal_loss_cuda
FUSED_ADAM FusedAdam fused_adam_cuda
FUSED_BIAS_SWIGLU FusedBiasSwiGLU
FUSED_CONV_BIAS_RELU FusedConvBiasRelu
FUSED_DENSE FusedDense fused_dense_cuda
FUSED_INDEX_MUL_2D FusedIndexMul2d
FUSED_LAMB FusedLamb fused_lamb_cuda
FUSED_LAYER_NORM FusedLayerNorm fused_layer_norm_cuda
FUSED_ROPE FusedRope fused_rotary_positional_embedding
FUSED_WEIGHT_GRADIENT_MLP FusedWeightGradientMlpCuda fused_weight_gradient_mlp_cuda
GENERIC_SCALED_MASKED_SOFTMAX_CUDA GenericScaledMaskedSoftmaxCuda
MLP Mlp mlp_cuda
NCCL_ALLOCATOR NCCLAllocator _apex_nccl_allocator
NCCL_P2P NCCLP2P nccl_p2p_cuda
PEER_MEMORY PeerMemory peer_memory_cuda
SCALED_MASKED_SOFTMAX_CUDA ScaledMaskedSoftmaxCuda
SCALED_SOFTMAX_CUDA ScaledSoftmaxCuda
SCALED_UPPER_TRIANG_MASKED_SOFTMAX_CUDA ScaledUpperTriangMaskedSoftmaxCuda
SYNCBN SyncBn
TRANSDUCER_JOINT TransducerJoint transducer_joint_cuda
TRANSDUCER_LOSS TransducerLoss transducer_loss_cuda
XENTROPY Xentropy xentropy_cuda
"""
_ROWS = [line.split() for line in _TABLE.strip().splitlines()]
EXTENSIONS = [Extension(name, title, *(rest or [name.lower()])) for name, title, *rest in _ROWS]

_MODULES = SUITE / "compatibility" / "apex"
_IN_CHECKOUT, _INSTALLED = SUITE / "apex_te" / "ops", SUITE / "ops"
_OPS = _IN_CHECKOUT if _IN_CHECKOUT.is_dir() else _INSTALLED


def served_by(module: str) -> tuple[str, ...] | None:
    """Returns the ops whose libraries an extension's module calls, None if there is no module."""
    # read off the sources: what the module imports of apex_te.ops, itself or through a helper
    if not (_MODULES / f"{module}.py").is_file():
        return None
    files, seen, found = [module], set(), set()
    while files:
        name = files.pop()
        seen.add(name)
        for package, imported in _imports(_MODULES / f"{name}.py"):
            if package == "apex_te.ops":
                found.update(_libraries(imported))
            elif package == "." and imported not in seen:
                files.append(imported)
    return tuple(sorted(found))


def _imports(path: Path) -> Iterator[tuple[str, str]]:
    """Yields ("apex_te.ops", module) and (".", module) for the imports of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom):
            continue
        source = "." * node.level + (node.module or "")
        if source in (".", "apex_te.ops"):
            yield from ((source, alias.name) for alias in node.names)
        elif source.startswith("apex_te.ops."):
            yield "apex_te.ops", source.split(".")[2]
        elif node.level == 1:
            yield ".", source[1:]


def _libraries(module: str) -> set[str]:
    """Returns the ops that a module of ``apex_te.ops`` binds functions of."""
    tree = ast.parse((_OPS / f"{module}.py").read_text(encoding="utf-8"))
    return {
        str(node.args[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "bind"
        and isinstance(node.args[0], ast.Constant)
    }
