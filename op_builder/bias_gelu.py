"""Builder of bias_gelu."""

from .builder import CUDAOpBuilder


class BiasGeluBuilder(CUDAOpBuilder):
    """GeLU of a sum with a bias, and its gradients, also straight to FP8."""

    NAME = "bias_gelu"

    def cxx_args(self) -> list[str]:
        """Returns flags that keep the kernels vectorized."""
        # jump threading would turn clamped arguments into selections of whole results
        return ["-fno-thread-jumps"]
