"""Loader of byte_transpose."""

from .loader import define_loader

define_loader(globals(), "byte_transpose")
