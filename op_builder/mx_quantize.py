"""Builder of mx_quantize."""

from .builder import CUDAOpBuilder


class MxQuantizeBuilder(CUDAOpBuilder):
    """Quantization to MXFP8, rowwise and columnwise in one pass."""

    NAME = "mx_quantize"
