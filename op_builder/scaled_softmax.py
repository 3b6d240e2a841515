"""Builder of scaled_softmax."""

from .builder import CUDAOpBuilder


class ScaledSoftmaxBuilder(CUDAOpBuilder):
    """Softmax of scaled, masked or causal attention scores, and its gradient."""

    NAME = "scaled_softmax"
