"""Builder of dense_gemm."""

from typing import ClassVar

from .builder import CUDAOpBuilder
from .jit.backends.archs import Capability


class DenseGemmBuilder(CUDAOpBuilder):
    """Builder of the suite's own FP8 matrix products, for GPUs of arch 9.0 alone.

    There is no library for the CPU, where ``fp8_gemm`` multiplies.
    """

    NAME = "dense_gemm"
    DEVICES = ("cuda",)
    min_arch: ClassVar[Capability] = (9, 0)
