"""Builder of multi_tensor."""

from .builder import CUDAOpBuilder


class MultiTensorBuilder(CUDAOpBuilder):
    """Builder of operations over lists of tensors: reductions, maps and optimizer steps."""

    NAME = "multi_tensor"
