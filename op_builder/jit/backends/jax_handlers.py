"""Declaration of the library of handlers through which JAX calls ops."""

from __future__ import annotations

from ...spec import JAX_HANDLERS, OpSpec


class JaxHandlersSpec(OpSpec):
    """Declaration of the handler library, which is made of ``csrc/jax_ffi/jax_ffi.cpp``.

    It needs neither Python's nor jaxlib's headers, so one library serves all of their versions.
    """

    NAME = JAX_HANDLERS
    BUILD_VAR = "APEX_BUILD_CPP_OPS"  # as the dispatcher, it goes along with whatever is prebuilt

    def absolute_name(self) -> str:
        return "apex_te.jax"

    def sources(self) -> list[str]:
        return ["csrc/jax_ffi/jax_ffi.cpp"]
