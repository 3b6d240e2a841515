"""Loader of scaled_softmax."""

from .loader import define_loader

define_loader(globals(), "scaled_softmax")
