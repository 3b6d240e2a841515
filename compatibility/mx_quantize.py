"""Loader of mx_quantize."""

from .loader import define_loader

define_loader(globals(), "mx_quantize")
