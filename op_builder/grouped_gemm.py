"""Builder of grouped_gemm."""

from typing import ClassVar

from .builder import CUDAOpBuilder
from .jit.backends.archs import Capability


class GroupedGemmBuilder(CUDAOpBuilder):
    """Builder of FP8 GEMMs over groups of rows, for GPUs of arch 9.0 alone.

    The group sizes lie in device memory. On the CPU, callers dequantize FP8 data instead.
    """

    NAME = "grouped_gemm"
    DEVICES = ("cuda",)
    min_arch: ClassVar[Capability] = (9, 0)
