"""One module for each op with its C functions, e.g. ``apex_te.compatibility.rope.rope_fwd``.

The subpackage ``apex`` has apex's extension modules.
"""

from apex_te.runtime.imports import attach_submodules as _attach

from .finder import find_ops as _find_ops

_find_ops(__path__)
__getattr__, __dir__ = _attach(__name__)
