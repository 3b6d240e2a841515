"""Builder of swiglu_block."""

from .builder import CUDAOpBuilder


class SwigluBlockBuilder(CUDAOpBuilder):
    """Builder of the gated activations that are cast to FP8 with block scaling in one pass."""

    NAME = "swiglu_block"
