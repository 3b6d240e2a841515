"""Builder of hif8."""

from .builder import CUDAOpBuilder


class Hif8Builder(CUDAOpBuilder):
    """HiF8 encode, decode and quantize with one scale for the tensor."""

    NAME = "hif8"
