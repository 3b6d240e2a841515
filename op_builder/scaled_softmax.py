"""Builder of scaled_softmax."""

from .builder import CUDAOpBuilder


class ScaledSoftmaxBuilder(CUDAOpBuilder):
    """Builder of the softmax of scaled, masked or causal attention scores, and of its gradient."""

    NAME = "scaled_softmax"
