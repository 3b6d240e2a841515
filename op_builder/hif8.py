"""Builder of hif8."""

from .builder import CUDAOpBuilder


class Hif8Builder(CUDAOpBuilder):
    """Builder of HiF8 encoding, decoding, and the cast with one scale for the tensor."""

    NAME = "hif8"
