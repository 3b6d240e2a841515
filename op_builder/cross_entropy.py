"""Builder of cross_entropy."""

from .builder import CUDAOpBuilder


class CrossEntropyBuilder(CUDAOpBuilder):
    """Builder of softmax cross entropy and its gradient from one read of the logits."""

    NAME = "cross_entropy"
