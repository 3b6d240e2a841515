"""Builder of layer_norm."""

from .builder import CUDAOpBuilder


class LayerNormBuilder(CUDAOpBuilder):
    """Builder of layer normalisation, also with a residual and with FP8 output."""

    NAME = "layer_norm"
