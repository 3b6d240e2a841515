"""Builder of activation."""

from .builder import CUDAOpBuilder


class ActivationBuilder(CUDAOpBuilder):
    """GeLU, quick GeLU, ReLU, squared ReLU and SiLU, also straight to FP8."""

    NAME = "activation"

    def cxx_args(self) -> list[str]:
        """Returns flags that keep the kernels vectorized."""
        # jump threading would turn clamped arguments into selections of whole results
        return ["-fno-thread-jumps"]
