"""Builder of byte_transpose."""

from .builder import CUDAOpBuilder


class ByteTransposeBuilder(CUDAOpBuilder):
    """The transposed copy of a matrix of 8-bit codes."""

    NAME = "byte_transpose"
