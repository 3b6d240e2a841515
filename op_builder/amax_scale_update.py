"""Builder of amax_scale_update."""

from .builder import CUDAOpBuilder


class AmaxScaleUpdateBuilder(CUDAOpBuilder):
    """Scales of the next step out of amax histories."""

    NAME = "amax_scale_update"
