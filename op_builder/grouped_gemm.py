"""Builder of grouped_gemm."""

from typing import ClassVar

from .builder import CUDAOpBuilder
from .jit.backends.archs import Capability


class GroupedGemmBuilder(CUDAOpBuilder):
    """Builder of FP8 matrix products over groups of rows, for GPUs of arch 9.0 alone.

    The sizes of the groups lie in device memory. There is no library for the CPU, where FP8 data is
    dequantized first.
    """

    NAME = "grouped_gemm"
    DEVICES = ("cuda",)
    min_arch: ClassVar[Capability] = (9, 0)
