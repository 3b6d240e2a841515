"""Builder of grouped_quantize."""

from .builder import CUDAOpBuilder


class GroupedQuantizeBuilder(CUDAOpBuilder):
    """Builder of the cast to FP8 of groups of rows, one scale each; their sizes lie on the GPU."""

    NAME = "grouped_quantize"
