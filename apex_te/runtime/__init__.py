"""Loading of the dispatcher and of op libraries, tracing modes, and per-stream scratch memory."""

from .dispatcher import core, function, ops, tensor_list
from .tracing import is_traced
from .workspace import workspace

__all__ = ["core", "function", "is_traced", "ops", "tensor_list", "workspace"]
