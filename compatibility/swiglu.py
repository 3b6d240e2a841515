"""Loader of swiglu."""

from .loader import define_loader

define_loader(globals(), "swiglu")
