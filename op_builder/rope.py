"""Builder of rope."""

from .builder import CUDAOpBuilder


class RopeBuilder(CUDAOpBuilder):
    """Builder of rotary position embedding."""

    NAME = "rope"
