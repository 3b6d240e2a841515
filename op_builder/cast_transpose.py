"""Builder of cast_transpose."""

from .builder import CUDAOpBuilder


class CastTransposeBuilder(CUDAOpBuilder):
    """Builder of the cast to FP8 with a given scale, rowwise and columnwise copy in one pass."""

    NAME = "cast_transpose"
