"""Declaration of the library of handlers through which JAX calls ops."""

from __future__ import annotations

from ...spec import JAX_HANDLERS, OpSpec


class JaxHandlersSpec(OpSpec):
    """Declaration of the handler library, which serves all versions of Python and jaxlib."""

    NAME = JAX_HANDLERS
    BUILD_VAR = "APEX_BUILD_CPP_OPS"  # as the dispatcher, it goes along with whatever is prebuilt

    def absolute_name(self) -> str:
        return "apex_te.jax"

    def sources(self) -> list[str]:
        return ["csrc/jax_ffi/jax_ffi.cpp"]
