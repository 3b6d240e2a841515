"""Builder of rms_norm."""

from .builder import CUDAOpBuilder


class RmsNormBuilder(CUDAOpBuilder):
    """Builder of RMS normalisation, also with a residual and with FP8 output."""

    NAME = "rms_norm"
