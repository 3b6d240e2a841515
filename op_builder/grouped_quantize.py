"""Builder of grouped_quantize."""

from .builder import CUDAOpBuilder


class GroupedQuantizeBuilder(CUDAOpBuilder):
    """Builder of the cast to FP8 of groups of rows with a scale for each group.

    The sizes of the groups lie in device memory.
    """

    NAME = "grouped_quantize"
