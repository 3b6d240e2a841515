"""Builder of dense_gemm."""

from typing import ClassVar

from .builder import CUDAOpBuilder
from .jit.backends.archs import Capability


class DenseGemmBuilder(CUDAOpBuilder):
    """Builder of FP8 GEMMs by apex_te's own kernels; only for GPUs of arch 9.0, not for the CPU."""

    NAME = "dense_gemm"
    DEVICES = ("cuda",)
    min_arch: ClassVar[Capability] = (9, 0)
