"""Builder of cast_transpose."""

from .builder import CUDAOpBuilder


class CastTransposeBuilder(CUDAOpBuilder):
    """Quantization to FP8, rowwise and columnwise in one pass."""

    NAME = "cast_transpose"
