"""Builder of fp8_gemm."""

from .builder import CUDAOpBuilder
from .jit.backends import hip, toolchain


class Fp8GemmBuilder(CUDAOpBuilder):
    """FP8 matrix products; the FP8 units it uses exist from arch 8.9 on, which it checks itself."""

    NAME = "fp8_gemm"

    def system_include_paths(self, device: str) -> list[str]:
        if device != "cuda":
            return []
        if hip.is_active():
            return hip.find_header("hipblaslt/hipblaslt.h")
        return toolchain.find_header("cublasLt.h", "cublas", toolchain.find_nvcc())
