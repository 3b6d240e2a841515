"""Constants of ``transformer_engine.pytorch.constants``: dtype numbers and names of options."""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import distributed

__all__ = [
    "AttnBiasTypes", "AttnMaskTypes", "AttnTypes", "DType", "FP8BwdTensorIdx", "FP8FwdTensorIdx",
    "GemmParallelModes", "LayerTypes", "TE_DType", "TE_DType_To_Torch", "dist_group_type",
]  # fmt: skip


class DType(enum.IntEnum):
    """Numbers by which Transformer Engine's C interface names dtypes."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10

    @classmethod
    def cast(cls, dtype: Any) -> DType:
        """Returns the member of a number, or of another enumeration's member of that number."""
        return cls(int(dtype))


DType.__module__ = "transformer_engine.pytorch.constants"

TE_DType_To_Torch = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}
TE_DType = {dtype: number for number, dtype in TE_DType_To_Torch.items()}

# Numbers of a module's scales in ``fp8_meta["scaling_fwd"]`` and ``fp8_meta["scaling_bwd"]``.
FP8FwdTensorIdx = SimpleNamespace(
    GEMM1_INPUT=0, GEMM1_WEIGHT=1, GEMM1_OUTPUT=2, GEMM2_INPUT=3, GEMM2_WEIGHT=4, GEMM2_OUTPUT=5,
    GEMM3_OUTPUT=8,
)  # fmt: skip
FP8BwdTensorIdx = SimpleNamespace(
    GRAD_OUTPUT1=0, GRAD_INPUT1=1, GRAD_OUTPUT2=2, GRAD_INPUT2=3, GRAD_OUTPUT3=4, GRAD_INPUT3=5
)

AttnMaskTypes = (
    "no_mask", "padding", "causal", "padding_causal", "causal_bottom_right",
    "padding_causal_bottom_right", "arbitrary",
)  # fmt: skip
AttnTypes = ("self", "cross")
AttnBiasTypes = ("pre_scale_bias", "post_scale_bias", "no_bias", "alibi")
LayerTypes = ("encoder", "decoder")
GemmParallelModes = ("row", "column", None)

if TYPE_CHECKING:
    dist_group_type: TypeAlias = distributed.ProcessGroup
else:
    # Without torch.distributed there is no group, and nothing is an instance of its type.
    dist_group_type = distributed.ProcessGroup if distributed.is_available() else type(None)
