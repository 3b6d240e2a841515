"""Loader of rms_norm."""

from .loader import define_loader

define_loader(globals(), "rms_norm")
