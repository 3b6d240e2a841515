"""Builder of byte_transpose."""

from .builder import CUDAOpBuilder


class ByteTransposeBuilder(CUDAOpBuilder):
    """Builder of the transpose of a matrix of FP8 data."""

    NAME = "byte_transpose"
