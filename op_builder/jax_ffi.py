"""Builder of ``apex_te_jax``, the library of handlers through which JAX calls ops."""

from .builder import CPUOpBuilder
from .jit.backends.jax_handlers import JaxHandlersSpec


class JaxBuilder(JaxHandlersSpec, CPUOpBuilder):
    """Builder of the handler library, which is compiled and cached as ops are."""

    NAME = JaxHandlersSpec.NAME
    BUILD_VAR = JaxHandlersSpec.BUILD_VAR
