"""Builder of fp8_gemm."""

from .builder import CUDAOpBuilder
from .jit.backends.library import gpu_backend


class Fp8GemmBuilder(CUDAOpBuilder):
    """Builder of FP8 GEMMs, which check for arch 8.9 in each call: ``min_arch`` is only 8.0."""

    NAME = "fp8_gemm"

    def system_include_paths(self, device: str) -> list[str]:
        """Returns cuBLASLt's include folder, if the compiler does not find the header itself."""
        return gpu_backend().blas_include() if device == "cuda" else []
