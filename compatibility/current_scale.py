"""Loader of current_scale."""

from .loader import define_loader

define_loader(globals(), "current_scale")
