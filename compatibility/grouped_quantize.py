"""Loader of grouped_quantize."""

from .loader import define_loader

define_loader(globals(), "grouped_quantize")
