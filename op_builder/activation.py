"""Builder of activation."""

from .builder import CUDAOpBuilder


class ActivationBuilder(CUDAOpBuilder):
    """Builder of GeLU, quick GeLU, ReLU, squared ReLU and SiLU, also with FP8 output."""

    NAME = "activation"

    def cxx_args(self) -> list[str]:
        """Returns a g++ flag without which the CPU loops are not vectorized."""
        # jump threading would turn clamped arguments into selections of whole results
        return ["-fno-thread-jumps"]
