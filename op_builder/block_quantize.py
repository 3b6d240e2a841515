"""Builder of block_quantize."""

from .builder import CUDAOpBuilder


class BlockQuantizeBuilder(CUDAOpBuilder):
    """Quantize to FP8 in blocks of 1x128 or 128x128, rowwise and transposed in one pass."""

    NAME = "block_quantize"
