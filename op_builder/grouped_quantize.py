"""Builder of grouped_quantize."""

from .builder import CUDAOpBuilder


class GroupedQuantizeBuilder(CUDAOpBuilder):
    """Quantization of groups of rows whose sizes only the device knows, with a scale each."""

    NAME = "grouped_quantize"
