"""Builder of mx_quantize."""

from .builder import CUDAOpBuilder


class MxQuantizeBuilder(CUDAOpBuilder):
    """Builder of the cast to MXFP8, rowwise and columnwise copy in one pass."""

    NAME = "mx_quantize"
