"""Builder of amax_scale_update."""

from .builder import CUDAOpBuilder


class AmaxScaleUpdateBuilder(CUDAOpBuilder):
    """Builder of the update, which computes the next step's scales from amax histories."""

    NAME = "amax_scale_update"
