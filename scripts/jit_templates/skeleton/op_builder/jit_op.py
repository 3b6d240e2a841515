"""Builder of jit_op."""

from .builder import CUDAOpBuilder


class JitOpBuilder(CUDAOpBuilder):
    """x / (1 + scale |x|) of every element."""

    NAME = "jit_op"
