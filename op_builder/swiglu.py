"""Builder of swiglu."""

from .builder import CUDAOpBuilder


class SwigluBuilder(CUDAOpBuilder):
    """Builder of the gated activations SwiGLU, GeGLU, ReGLU and GLU."""

    NAME = "swiglu"
