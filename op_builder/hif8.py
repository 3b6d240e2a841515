"""Builder of hif8."""

from .builder import CUDAOpBuilder


class Hif8Builder(CUDAOpBuilder):
    """HiF8: encoding, decoding, and quantization with one scale for the tensor."""

    NAME = "hif8"
