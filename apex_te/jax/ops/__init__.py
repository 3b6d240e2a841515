"""The ops as functions of JAX arrays: one module for each, with the names of ``apex_te.ops``.

Arguments, results and errors of a function, and fields of a class, are those of its namesake there,
but for what its docstring says; what PyTorch's functions allocate or update in place is returned.
All work inside ``jax.jit``; those whose docstring says so are differentiable once, in reverse mode.
"""

from ...runtime.imports import attach_submodules as _attach

__getattr__, __dir__ = _attach(__name__)
