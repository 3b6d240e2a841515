"""Builder of layer_norm."""

from .builder import CUDAOpBuilder


class LayerNormBuilder(CUDAOpBuilder):
    """Layer normalisation, also with a residual and straight to FP8."""

    NAME = "layer_norm"
