"""Loaders of the ops: real modules whose functions build their library when first called."""

from apex_te.runtime.lazy import attach_submodules as _attach

__getattr__, __dir__ = _attach(__name__)
