"""Builder of grouped_gemm."""

from typing import ClassVar

from .builder import CUDAOpBuilder
from .jit.backends.archs import Capability


class GroupedGemmBuilder(CUDAOpBuilder):
    """FP8 products over groups whose sizes the device knows, on arch 9.0 alone.

    There is no library for the CPU, where FP8 data is dequantized first.
    """

    NAME = "grouped_gemm"
    DEVICES = ("cuda",)
    min_arch: ClassVar[Capability] = (9, 0)
