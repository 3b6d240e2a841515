"""Builder of qkv_cast."""

from .builder import CUDAOpBuilder


class QkvCastBuilder(CUDAOpBuilder):
    """Builder of the casts of a fused QKV projection's weight and output gradient to FP8."""

    NAME = "qkv_cast"
