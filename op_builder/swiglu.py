"""Builder of swiglu."""

from .builder import CUDAOpBuilder


class SwigluBuilder(CUDAOpBuilder):
    """The gated activations SwiGLU, GeGLU, ReGLU and GLU."""

    NAME = "swiglu"
