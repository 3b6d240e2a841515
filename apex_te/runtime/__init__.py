"""Loading of the dispatcher and of op libraries, and per-stream scratch memory."""

from .dispatcher import core, function, ops, tensor_list
from .workspace import workspace

__all__ = ["core", "function", "ops", "tensor_list", "workspace"]
