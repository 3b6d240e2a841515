"""Loader of amax_scale_update."""

from .loader import define_loader

define_loader(globals(), "amax_scale_update")
