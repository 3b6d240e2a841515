"""Loader of multi_tensor."""

from .loader import define_loader

define_loader(globals(), "multi_tensor")
