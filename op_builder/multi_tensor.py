"""Builder of multi_tensor."""

from .builder import CUDAOpBuilder


class MultiTensorBuilder(CUDAOpBuilder):
    """One operation over a list of tensors: reductions, maps and optimizer steps."""

    NAME = "multi_tensor"
