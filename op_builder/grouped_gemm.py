"""Builder of grouped_gemm."""

from typing import ClassVar

from .builder import CUDAOpBuilder
from .jit.backends.archs import Capability


class GroupedGemmBuilder(CUDAOpBuilder):
    """Builder of FP8 matrix products over groups of rows, for GPUs of arch 9.0 alone.

    The sizes of the groups lie in device memory. There is no library for the CPU; on the CPU, FP8
    data is dequantized before the product.
    """

    NAME = "grouped_gemm"
    DEVICES = ("cuda",)
    min_arch: ClassVar[Capability] = (9, 0)
