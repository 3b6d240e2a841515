"""Builder of bias_gelu."""

from .builder import CUDAOpBuilder


class BiasGeluBuilder(CUDAOpBuilder):
    """Builder of GeLU of a sum with a bias, and of its gradients, also with FP8 output."""

    NAME = "bias_gelu"

    def cxx_args(self) -> list[str]:
        """Returns a g++ flag without which the CPU loops are not vectorized."""
        # jump threading would turn clamped arguments into selections of whole results
        return ["-fno-thread-jumps"]
