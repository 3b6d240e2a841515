"""Builder of current_scale."""

from .builder import CUDAOpBuilder


class CurrentScaleBuilder(CUDAOpBuilder):
    """Quantization to FP8 with a scale computed from the tensor itself."""

    NAME = "current_scale"
