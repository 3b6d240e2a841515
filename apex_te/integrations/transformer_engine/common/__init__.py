"""Transformer Engine's names that belong to no framework: the recipes."""

from . import recipe

__all__ = ["recipe"]
