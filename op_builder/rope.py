"""Builder of rope."""

from .builder import CUDAOpBuilder


class RopeBuilder(CUDAOpBuilder):
    """Rotary position embedding."""

    NAME = "rope"
