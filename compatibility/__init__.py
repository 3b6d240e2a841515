"""The ops' functions as modules: ``apex_te.compatibility.rope.rope_fwd``; and apex's modules."""

from apex_te.runtime.lazy import attach_submodules as _attach

from .finder import find_ops as _find_ops

_find_ops(__path__)
__getattr__, __dir__ = _attach(__name__)
