"""Loader of cast_transpose."""

from .loader import define_loader

define_loader(globals(), "cast_transpose")
