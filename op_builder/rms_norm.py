"""Builder of rms_norm."""

from .builder import CUDAOpBuilder


class RmsNormBuilder(CUDAOpBuilder):
    """RMS normalisation, also with a residual and straight to FP8."""

    NAME = "rms_norm"
