"""Builder of block_quantize."""

from .builder import CUDAOpBuilder


class BlockQuantizeBuilder(CUDAOpBuilder):
    """Builder of the cast to FP8 with block scaling, rowwise and columnwise copy in one pass."""

    NAME = "block_quantize"
