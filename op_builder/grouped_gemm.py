"""Builder of grouped_gemm."""

from typing import ClassVar

from .builder import CUDAOpBuilder
from .jit.backends.archs import Capability


class GroupedGemmBuilder(CUDAOpBuilder):
    """Builder of FP8 GEMMs over groups of rows, whose sizes lie on the GPU; for arch 9.0 alone."""

    NAME = "grouped_gemm"
    DEVICES = ("cuda",)
    min_arch: ClassVar[Capability] = (9, 0)
