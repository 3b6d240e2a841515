"""Loader of block_quantize."""

from .loader import define_loader

define_loader(globals(), "block_quantize")
