"""Loading of op libraries, detection of tracing, scratch memory of streams, copies of scalars."""

from .dispatcher import core, function, ops, tensor_list
from .tracing import is_traced
from .transfer import moved
from .workspace import workspace

__all__ = ["core", "function", "is_traced", "moved", "ops", "tensor_list", "workspace"]
