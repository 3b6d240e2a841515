"""Access to op libraries, detection of tracing, scratch memory of kernels, copies to a device."""

from typing import TYPE_CHECKING

from .imports import attach

if TYPE_CHECKING:
    from .device import moved as moved
    from .device import workspace as workspace
    from .dispatcher import core as core
    from .dispatcher import function as function
    from .dispatcher import ops as ops
    from .dispatcher import tensor_list as tensor_list
    from .tracing import is_traced as is_traced

_NAMES = {
    "core": "dispatcher",
    "function": "dispatcher",
    "is_traced": "tracing",
    "moved": "transfer",
    "ops": "dispatcher",
    "tensor_list": "dispatcher",
    "workspace": "workspaces",
}
__all__ = [*_NAMES]
if not TYPE_CHECKING:  # type checkers know the names above, and no others
    __getattr__, __dir__ = attach(__name__, _NAMES)
