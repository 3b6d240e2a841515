"""Loader of bias_gelu."""

from .loader import define_loader

define_loader(globals(), "bias_gelu")
