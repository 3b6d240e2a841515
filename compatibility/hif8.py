"""Loader of hif8."""

from .loader import define_loader

define_loader(globals(), "hif8")
