"""Builder of bias_dropout_add."""

from .builder import CUDAOpBuilder


class BiasDropoutAddBuilder(CUDAOpBuilder):
    """Builder of bias addition, dropout and residual addition in one pass."""

    NAME = "bias_dropout_add"
