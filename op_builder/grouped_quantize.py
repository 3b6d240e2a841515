"""Builder of grouped_quantize."""

from .builder import CUDAOpBuilder


class GroupedQuantizeBuilder(CUDAOpBuilder):
    """Quantize groups of rows whose sizes only the device knows, each with a scale of its own."""

    NAME = "grouped_quantize"
