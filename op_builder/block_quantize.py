"""Builder of block_quantize."""

from .builder import CUDAOpBuilder


class BlockQuantizeBuilder(CUDAOpBuilder):
    """Quantization to FP8 in blocks of 1x128 or 128x128, rowwise and columnwise in one pass."""

    NAME = "block_quantize"
