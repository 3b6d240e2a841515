"""Loader of rope."""

from .loader import define_loader

define_loader(globals(), "rope")
