"""Builder of fp8_gemm."""

from .builder import CUDAOpBuilder
from .jit.backends.library import gpu_backend


class Fp8GemmBuilder(CUDAOpBuilder):
    """FP8 matrix products; the FP8 units it uses exist from arch 8.9 on, which it checks itself."""

    NAME = "fp8_gemm"

    def system_include_paths(self, device: str) -> list[str]:
        """Returns the folders that the header of cuBLASLt or hipBLASLt takes."""
        return gpu_backend().blas_include() if device == "cuda" else []
