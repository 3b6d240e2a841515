"""Loader of jit_op."""

from .loader import define_loader

define_loader(globals(), "jit_op")
