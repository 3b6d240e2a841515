"""Loader of activation."""

from .loader import define_loader

define_loader(globals(), "activation")
