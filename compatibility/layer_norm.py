"""Loader of layer_norm."""

from .loader import define_loader

define_loader(globals(), "layer_norm")
