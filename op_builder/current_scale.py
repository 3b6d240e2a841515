"""Builder of current_scale."""

from .builder import CUDAOpBuilder


class CurrentScaleBuilder(CUDAOpBuilder):
    """Builder of the cast to FP8 with current scaling, whose scale comes from the tensor's amax."""

    NAME = "current_scale"
