"""Builder of amax_scale_update."""

from .builder import CUDAOpBuilder


class AmaxScaleUpdateBuilder(CUDAOpBuilder):
    """The next step's scales, computed from amax histories."""

    NAME = "amax_scale_update"
