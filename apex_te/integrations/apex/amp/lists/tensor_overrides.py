"""Names of ``torch.Tensor`` that apex casts; here ``torch.autocast`` decides."""

import torch

from . import torch_overrides

MODULE = torch.Tensor
_MATMULS = ["addmm", "addmv", "addr", "matmul", "mm", "mv", "bmm", "addbmm", "baddbmm"]
FP16_FUNCS = ["__matmul__", *_MATMULS]
BFLOAT16_FUNCS = list(FP16_FUNCS)
FP32_FUNCS = [
    "__ipow__", "__pow__", "__rpow__",
    *(name for name in torch_overrides.FP32_FUNCS if not name.endswith("softmax")),
]  # fmt: skip
CASTS = [
    "__add__", "__div__", "__eq__", "__ge__", "__gt__", "__iadd__", "__idiv__", "__imul__",
    "__isub__", "__itruediv__", "__le__", "__lt__", "__mul__", "__ne__", "__radd__", "__rdiv__",
    "__rmul__", "__rsub__", "__rtruediv__", "__sub__", "__truediv__",
]  # fmt: skip
SEQUENCE_CASTS: list[str] = []
