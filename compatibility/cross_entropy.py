"""Loader of cross_entropy."""

from .loader import define_loader

define_loader(globals(), "cross_entropy")
