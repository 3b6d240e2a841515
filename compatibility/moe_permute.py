"""Loader of moe_permute."""

from .loader import define_loader

define_loader(globals(), "moe_permute")
