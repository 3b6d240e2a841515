"""Builder of cast_transpose."""

from .builder import CUDAOpBuilder


class CastTransposeBuilder(CUDAOpBuilder):
    """Quantize to FP8, rowwise and transposed in one pass."""

    NAME = "cast_transpose"
