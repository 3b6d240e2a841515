"""Names of ROCm apex's extensions, and the ops behind those that ``compatibility/apex`` has."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .spec import SUITE


class Extension(NamedTuple):
    """An extension of apex.

    Attributes:
        variable: what follows ``APEX_BUILD_`` in the variable that asks for it at install.
        builder: its builder's class name without ``Builder``.
        module: import name.
    """

    variable: str
    builder: str
    module: str


EXTENSIONS = (
    Extension("AMP_C", "AmpC", "amp_C"),
    Extension("APEX_C", "ApexC", "apex_C"),
    Extension("BNP", "Bnp", "bnp"),
    Extension("DISTRIBUTED_ADAM", "DistributedAdam", "distributed_adam_cuda"),
    Extension("DISTRIBUTED_LAMB", "DistributedLamb", "distributed_lamb_cuda"),
    Extension("FAST_MULTIHEAD_ATTN", "FastMultiheadAttn", "fast_multihead_attn"),
    Extension("FOCAL_LOSS", "FocalLoss", "focal_loss_cuda"),
    Extension("FUSED_ADAM", "FusedAdam", "fused_adam_cuda"),
    Extension("FUSED_BIAS_SWIGLU", "FusedBiasSwiGLU", "fused_bias_swiglu"),
    Extension("FUSED_CONV_BIAS_RELU", "FusedConvBiasRelu", "fused_conv_bias_relu"),
    Extension("FUSED_DENSE", "FusedDense", "fused_dense_cuda"),
    Extension("FUSED_INDEX_MUL_2D", "FusedIndexMul2d", "fused_index_mul_2d"),
    Extension("FUSED_LAMB", "FusedLamb", "fused_lamb_cuda"),
    Extension("FUSED_LAYER_NORM", "FusedLayerNorm", "fused_layer_norm_cuda"),
    Extension("FUSED_ROPE", "FusedRope", "fused_rotary_positional_embedding"),
    Extension(
        "FUSED_WEIGHT_GRADIENT_MLP",
        "FusedWeightGradientMlpCuda",
        "fused_weight_gradient_mlp_cuda",
    ),
    Extension(
        "GENERIC_SCALED_MASKED_SOFTMAX_CUDA",
        "GenericScaledMaskedSoftmaxCuda",
        "generic_scaled_masked_softmax_cuda",
    ),
    Extension("MLP", "Mlp", "mlp_cuda"),
    Extension("NCCL_ALLOCATOR", "NCCLAllocator", "_apex_nccl_allocator"),
    Extension("NCCL_P2P", "NCCLP2P", "nccl_p2p_cuda"),
    Extension("PEER_MEMORY", "PeerMemory", "peer_memory_cuda"),
    Extension(
        "SCALED_MASKED_SOFTMAX_CUDA", "ScaledMaskedSoftmaxCuda", "scaled_masked_softmax_cuda"
    ),
    Extension("SCALED_SOFTMAX_CUDA", "ScaledSoftmaxCuda", "scaled_softmax_cuda"),
    Extension(
        "SCALED_UPPER_TRIANG_MASKED_SOFTMAX_CUDA",
        "ScaledUpperTriangMaskedSoftmaxCuda",
        "scaled_upper_triang_masked_softmax_cuda",
    ),
    Extension("SYNCBN", "SyncBn", "syncbn"),
    Extension("TRANSDUCER_JOINT", "TransducerJoint", "transducer_joint_cuda"),
    Extension("TRANSDUCER_LOSS", "TransducerLoss", "transducer_loss_cuda"),
    Extension("XENTROPY", "Xentropy", "xentropy_cuda"),
)

_MODULES = SUITE / "compatibility" / "apex"
# apex_te/ops in a checkout, ops in an installed package
_OPS = next(
    (path for path in (SUITE / "apex_te" / "ops", SUITE / "ops") if path.is_dir()), SUITE / "ops"
)


def served_by(module: str) -> tuple[str, ...] | None:
    """Returns the ops whose libraries an extension's module calls, None if there is no module.

    They are read off the sources, so that no table has to follow them: what the module imports of
    ``apex_te.ops``, itself or through a helper beside it, and which libraries that binds.
    """
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
