"""Builder of dense_gemm."""

from typing import ClassVar

from .builder import CUDAOpBuilder
from .jit.backends.archs import Capability


class DenseGemmBuilder(CUDAOpBuilder):
    """Builder of FP8 matrix products by apex_te's own kernels, for GPUs of arch 9.0 alone.

    There is no library for the CPU; the op ``fp8_gemm`` has one.
    """

    NAME = "dense_gemm"
    DEVICES = ("cuda",)
    min_arch: ClassVar[Capability] = (9, 0)
